"""Log-linear attention: kernels of ops/hierarchical_pooling.py and log_linear_attention.py."""
