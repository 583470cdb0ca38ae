"""Ops as pure functions of tensors in plain PyTorch: the definitions that the GPU kernels are tested against."""

from foveate.ops.hierarchical_pooling import Selection, select_blocks
from foveate.ops.log_linear_attention import LogLinearOutput, log_linear_attention

__all__ = ["LogLinearOutput", "Selection", "log_linear_attention", "select_blocks"]
