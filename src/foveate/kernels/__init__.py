"""GPU kernels of the ops, with the same names and signatures, called by `foveate.ops.dispatch`."""
