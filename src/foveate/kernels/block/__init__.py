"""Attention over a block table, and permuted tokens: kernels of ops/block_attention.py and permute_tokens.py."""
