"""GPU twins of ops, same names and signatures; `foveate.ops.dispatch` is their one caller."""
