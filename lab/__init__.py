"""Benchmarks, studies and training behind the numbers of the documentation; not installed."""
