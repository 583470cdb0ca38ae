# pyright: basic
"""Pooling and picking of log-linear attention on NVIDIA GPUs as custom ops, and `select_blocks` made of them."""

from itertools import pairwise

import torch
from torch import Tensor

from foveate.kernels.block.block_attention import side_by_side
from foveate.kernels.gpu_op import gpu_op
from foveate.kernels.log_linear import hierarchical_pooling, selection

__all__ = ["by_level", "packed", "pick_nodes", "pool_levels", "select_blocks", "takes"]

LARGEST_HEAD = 128  # those of 256 spill


def takes(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernels run there: an NVIDIA GPU of sm_80 or later, half precision, heads of at most 128."""
    half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda" and half and size <= LARGEST_HEAD and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """What `foveate.ops.select_blocks` defines: lists and counts."""
    means, counts, _ = pool_levels([side_by_side(q), side_by_side(k)], packed(real), block, levels)
    return pick_nodes(means, counts, q.shape[2], block, levels, top_k), by_level(counts, q.shape[2], block, levels)


def packed(real: Tensor | None) -> Tensor | None:
    """The mask, if there is one, without gaps."""
    return None if real is None else real.contiguous()


def by_level(counts: Tensor, tokens: int, block: int, levels: int) -> tuple[Tensor, ...]:
    """Counts of the nodes of each level."""
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


BACKENDS = {"triton": (takes, select_blocks)}
