"""Attention of single rows over a long cache, and copies of rows: kernels of ops/row_attention.py and rotary.py."""
