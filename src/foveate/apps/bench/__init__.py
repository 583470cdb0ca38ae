"""The benchmark of `foveate bench step`: what a method gains on a given model at a given size."""
