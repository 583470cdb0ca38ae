"""Attention of single rows over a long cache, and copied rows: twins of ops/row_attention.py and rotary.py."""
