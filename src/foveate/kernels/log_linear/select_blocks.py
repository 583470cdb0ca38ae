# pyright: basic
"""Hierarchical block selection on NVIDIA GPUs: custom ops for pooling and picking, and `select_blocks`."""

from itertools import pairwise

import torch
from torch import Tensor

from foveate.kernels.launch import gpu_op, half_precision, row_contiguous
from foveate.kernels.log_linear import hierarchical_pooling, selection

__all__ = ["BACKENDS", "pick_nodes", "pool_levels", "select_blocks", "split_levels", "supports"]

LARGEST_HEAD = 128  # wider heads spill registers


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels run: NVIDIA Ampere or newer, half precision, head_dim at most 128."""
    return (
        device.type == "cuda"
        and half_precision(dtype)
        and head_dim <= LARGEST_HEAD
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Lists and counts of `foveate.ops.select_blocks`."""
    means, counts, _ = pool_levels([row_contiguous(q), row_contiguous(k)], real, block, levels)
    return pick_nodes(means, counts, q.shape[2], block, levels, top_k), split_levels(counts, q.shape[2], block, levels)


def split_levels(counts: Tensor, tokens: int, block: int, levels: int) -> tuple[Tensor, ...]:
    """The counts of each level, from those of all levels."""
    return counts.split([b - a for a, b in pairwise(hierarchical_pooling.level_starts(tokens, block, levels))], 1)


@gpu_op("foveate::pool_levels")
def pool_levels(tensors: list[Tensor], real: Tensor | None, block: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """`hierarchical_pooling.pool` as a custom op."""
    return hierarchical_pooling.pool(tensors, real, block, levels)


@pool_levels.register_fake
def _(tensors: list[Tensor], real: Tensor | None, block: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, dim = tensors[0].shape
    nodes = hierarchical_pooling.level_starts(tokens, block, levels)[-1]
    counts = tensors[0].new_empty(1 if real is None else batch, nodes, dtype=torch.int32)
    means = tensors[0].new_empty(len(tensors), batch, heads, nodes, dim)
    return means, counts, torch.empty_like(counts, dtype=torch.float32)


@gpu_op("foveate::pick_nodes")
def pick_nodes(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    """`selection.select` as a custom op."""
    return selection.select(means[0], means[1], counts, tokens, block, levels, top_k)


@pick_nodes.register_fake
def _(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    sizes = [b - a for a, b in pairwise(hierarchical_pooling.level_starts(tokens, block, levels))]
    return [means.new_empty(*means.shape[1:3], nodes, min(top_k, nodes), dtype=torch.int32) for nodes in sizes]


BACKENDS = {"triton": (supports, select_blocks)}
