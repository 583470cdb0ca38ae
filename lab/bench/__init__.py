"""Benchmarks of kernels and calls against other implementations, checked before timing."""
