# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Hierarchical pooling in Triton: one launch computes two levels of up to three tensors.

The levels of a tensor are consecutive in one buffer, the finest first, so that kernels need only one pointer.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, launcher, padded_size, recorded

__all__ = ["empty_means", "level_sizes", "level_starts", "pool"]

NUMBERS = ("rows", "heads", "first", "nodes", "s_weight", "s_count")  # not specialized when they equal 1


def level_starts(tokens: int, block: int, levels: int) -> list[int]:
    """Index of the first node of each level among the nodes of all levels, and the total number of nodes.

    Examples:
        >>> level_starts(1000, 16, 2)
        [0, 63, 67]
    """
    starts = [0]
    for _ in range(levels):
        tokens = -(-tokens // block)
        starts.append(starts[-1] + tokens)
    return starts


def level_sizes(tokens: int, block: int, levels: int) -> list[int]:
    """Number of nodes of each level, the finest first."""
    return [end - start for start, end in pairwise(level_starts(tokens, block, levels))]


@triton.jit
def _pool_node(
    p_x, p_mean, p_upper_mean, p_upper_sum, p_weight, p_count, p_log, node, rows, s_x, counting,
    WEIGHTED: tl.constexpr, UPPER: tl.constexpr, SUMS: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Means of one node of the upper level and of its B children, from B * B rows."""
    o_b, o_d = node * B + tl.arange(0, B), tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    total = tl.zeros([B, BD], tl.float32)
    count = tl.zeros([B], tl.int32)
    for t in tl.range(0, B, num_stages=3):  # each thread sums its own loads, without exchange
        o_x = o_b * B + t
        weight = (o_x < rows).to(tl.int32)  # [B]
        if WEIGHTED:
            weight = tl.load(p_weight + o_x, mask=o_x < rows, other=0).to(tl.int32)
        x = tl.load(p_x + o_x[:, None].to(tl.int64) * s_x + o_d[None, :], mask=(weight > 0)[:, None] & m_d, other=0.0)
        total += x.to(tl.float32)
        count += weight
    m_b = o_b < tl.cdiv(rows, B)
    mean = total / tl.maximum(count, 1)[:, None]  # [B, BD]
    tl.store(
        p_mean + o_b[:, None].to(tl.int64) * D + o_d[None, :],
        mean.to(p_mean.dtype.element_ty),
        mask=m_b[:, None] & m_d,
    )
    if counting:
        tl.store(p_count + o_b, count, mask=m_b)
        tl.store(p_log + o_b, tl.math.log2(count.to(tl.float32)), mask=m_b)
    if UPPER:
        p_upper_mean += node.to(tl.int64) * D + o_d
        total, count = tl.sum(total, 0), tl.sum(count, 0)  # [BD]
        mean = total / tl.maximum(count, 1)
        tl.store(p_upper_mean, mean.to(p_mean.dtype.element_ty), mask=o_d < D)
        if SUMS:
            tl.store(p_upper_sum + node.to(tl.int64) * D + o_d, total, mask=o_d < D)
        if counting:
            node += tl.cdiv(rows, B)
            tl.store(p_count + node, count)
            tl.store(p_log + node, tl.math.log2(count.to(tl.float32)))


@triton.jit(do_not_specialize=NUMBERS)
def _pool(
    p_x, p_y, p_z, p_means, p_sums, p_weight, p_counts, p_logs, rows, heads, first, nodes, s_weight, s_count,
    s_xb, s_xh, s_x, s_yb, s_yh, s_y, s_zb, s_zh, s_z,
    WEIGHTED: tl.constexpr, UPPER: tl.constexpr, SUMS: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Two levels of one head of one tensor; the lower level begins at node `first` of all `nodes`."""
    lower = tl.cdiv(rows, B)
    upper = tl.cdiv(lower, B)
    node, sample = tl.program_id(0) % upper, tl.program_id(0) // upper
    which, batch, head = tl.program_id(1), (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    place = which.to(tl.int64) * (tl.num_programs(0) // upper) + sample
    p_mean = p_means + (place * nodes + first) * D
    p_upper_mean = p_mean + lower.to(tl.int64) * D
    p_sums += place * upper * D
    p_weight += batch * s_weight
    p_count = p_counts + batch * s_count + first
    p_log = p_logs + batch * s_count + first
    counting = (which == 0) & (head == 0) & ((batch == 0) | (s_count > 0))
    if which == 0:
        _pool_node(
            p_x + batch * s_xb + head * s_xh, p_mean, p_upper_mean, p_sums, p_weight, p_count, p_log, node,
            rows, s_x, counting, WEIGHTED, UPPER, SUMS, B, D, BD,
        )  # fmt: skip
    elif which == 1:
        _pool_node(
            p_y + batch * s_yb + head * s_yh, p_mean, p_upper_mean, p_sums, p_weight, p_count, p_log, node,
            rows, s_y, counting, WEIGHTED, UPPER, SUMS, B, D, BD,
        )  # fmt: skip
    else:
        _pool_node(
            p_z + batch * s_zb + head * s_zh, p_mean, p_upper_mean, p_sums, p_weight, p_count, p_log, node,
            rows, s_z, counting, WEIGHTED, UPPER, SUMS, B, D, BD,
        )  # fmt: skip


@recorded
def pool(tensors: list[Tensor], real: Tensor | None, block: int, levels: int) -> list[Tensor]:
    """Means, counts and binary logarithms of the counts of the nodes of all levels, the finest level first.

    Means are [tensors, batch, heads, nodes of all levels, dim]. Counts are int32 [batch, nodes of all levels], or one
    row for the whole batch if no token is padding; logarithms are float32. Sums are kept in float32 from level to
    level, so each mean is rounded once. Padding is never read.

    Args:
        tensors: Tensors [batch, heads, tokens, dim] whose last dimension has stride 1.
        real: Contiguous bool [batch, tokens], False where a token is padding.
        block: Number of children of a node.
        levels: Number of levels, 1 to 4.
    """
    batch, heads, tokens, dim = tensors[0].shape
    starts = level_starts(tokens, block, levels)
    means, counts, logs = empty_means(tensors, real, starts[-1])
    weight = counts if real is None else real.view(torch.uint8)
    rows, given = tokens, tensors
    for level in range(0, levels, 2):
        _, upper = level_sizes(rows, block, 2)
        further = levels > level + 2
        sums = means.new_empty((len(given), batch, heads, upper, dim), dtype=torch.float32) if further else means
        _launch_pool(
            *given, *[given[0]] * (3 - len(given)), means, sums, weight, counts, logs,
            len(given), rows, starts[level], levels - level, block, real is not None, level > 0,
        )  # fmt: skip
        if further:
            rows, given, weight = upper, list(sums.unbind(0)), counts[:, starts[level + 1] :]
    return [means, counts, logs]


@launcher
def _launch_pool(
    x: Tensor, y: Tensor, z: Tensor, means: Tensor, sums: Tensor, weight: Tensor, counts: Tensor, logs: Tensor,
    tensors: int, rows: int, first: int, left: int, block: int, masked: bool, counted: bool,
) -> Launch:  # fmt: skip
    """Pool two levels, the lower of which begins at node `first`; `left` is the number of remaining levels."""
    batch, heads, _, dim = x.shape
    _, upper = level_sizes(rows, block, 2)
    args = (
        x, y, z, means, sums, weight, counts, logs, rows, heads, first, means.shape[3],
        0 if len(weight) == 1 else weight.stride(0), counts.stride(0) if masked else 0,
        *(stride for tensor in (x, y, z) for stride in tensor.stride()[:3]),
    )  # fmt: skip
    constants = {
        "WEIGHTED": masked or counted, "UPPER": left > 1, "SUMS": left > 2, "B": block, "D": dim,
        "BD": padded_size(dim), "num_warps": _pool_warps(block, dim),
    }  # fmt: skip
    return Launch(_pool, (batch * heads * upper, tensors), args, constants)


def empty_means(tensors: list[Tensor], real: Tensor | None, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized tensors for the results of `pool`."""
    batch, heads, _, dim = tensors[0].shape
    means = tensors[0].new_empty(len(tensors), batch, heads, nodes, dim)
    counts = means.new_empty(1 if real is None else batch, nodes, dtype=torch.int32)
    return means, counts, torch.empty_like(counts, dtype=torch.float32)


def _pool_warps(block: int, dim: int) -> int:
    return max(1, min(8, block * padded_size(dim) // 1024))
