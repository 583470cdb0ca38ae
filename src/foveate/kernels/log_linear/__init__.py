"""Log-linear attention: twins of ops/hierarchical_pooling.py and log_linear_attention.py."""
