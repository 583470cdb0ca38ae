"""Benchmarks that check before they time, ours and its peers taking turns in one process."""
