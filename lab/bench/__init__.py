"""Benchmarks: what kernels and calls cost beside other implementations, checked before they are timed."""
