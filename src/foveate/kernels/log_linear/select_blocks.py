# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Hierarchical block selection: nodes pick top-k nodes, from the coarsest level to the finest, as a custom op.

Scores never leave the registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import (
    AMPERE,
    Launch,
    compute_capability,
    gpu_op,
    half_precision,
    launcher,
    padded_size,
    recorded,
    row_contiguous,
)
from foveate.kernels.log_linear.pooling import empty_means, level_sizes, level_starts, pool

__all__ = ["BACKENDS", "empty_lists", "pick_nodes", "select_blocks", "supports"]

LARGEST_HEAD = 128  # wider heads spill registers

CANDIDATES = 64  # candidates scored at once
AT_TOP = 256  # a top level of at most this many nodes is scored at once, by more warps, as it has few programs
LOWEST_KEY = tl.constexpr(-(2**63))  # less than the sort key of any score or free place in a list
NO_NODE = tl.constexpr(2**31 - 1)
NUMBERS = ("heads", "nodes", "all_nodes", "first", "s_count", "above", "picks")  # not specialized when they equal 1


@triton.jit
def _keys(scores, nodes):
    """Sort keys, int64, in the order of the scores; ties go to the smaller node, and NaN counts as infinity."""
    scores = tl.where(scores == scores, scores, float("inf"))
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (nodes ^ NO_NODE).to(tl.int64)[None, :]


@triton.jit(do_not_specialize=NUMBERS)
def _select(
    p_q, p_k, p_counts, p_above, p_list, heads, nodes, all_nodes, first, s_count, above, picks,
    TOP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Picks of B siblings, among all nodes of the top level or among the children of their parent's picks."""
    parents = tl.cdiv(nodes, B)
    parent, sample = tl.program_id(0) % parents, (tl.program_id(0) // parents).to(tl.int64)
    p_q += (sample * all_nodes + first) * D
    p_k += (sample * all_nodes + first) * D
    p_counts += (sample // heads) * s_count + first
    p_above += (sample * parents + parent) * above
    o_b, o_n, o_d, o_k = parent * B + tl.arange(0, B), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, K)
    m_b, m_d = o_b < nodes, (o_d < D)[None, :]
    q = tl.load(p_q + o_b[:, None].to(tl.int64) * D + o_d[None, :], mask=m_b[:, None] & m_d, other=0.0)  # [B, BD]
    # best keys so far: free places hold distinct small keys; a key after the first `picks` is never replaced
    kept = tl.where(o_k < picks, LOWEST_KEY + 1 + o_k.to(tl.int64), 2**63 - 1)[None, :]
    kept += tl.zeros([B, 1], tl.int64)
    for start in range(0, nodes if TOP else above * B, BN):
        o_c = start + o_n
        if TOP:
            o_c = tl.where(o_c < nodes, o_c, -1)
        else:
            pick = tl.load(p_above + o_c // B, mask=o_c < above * B, other=-1)
            o_c = tl.where(pick >= 0, pick * B + o_c % B, -1)
            o_c = tl.where(o_c < nodes, o_c, -1)
        alive = tl.load(p_counts + o_c, mask=o_c >= 0, other=0) > 0  # [BN]
        k = tl.load(p_k + o_c[:, None].to(tl.int64) * D + o_d[None, :], mask=alive[:, None] & m_d, other=0.0)
        keys = _keys(tl.dot(q, tl.trans(k), input_precision="ieee"), o_c)  # [B, BN]
        keys = tl.where(alive[None, :] & m_b[:, None], keys, LOWEST_KEY)
        best, worst = tl.max(keys, 1), tl.min(kept, 1)
        while tl.max((best > worst).to(tl.int32), 0) > 0:
            kept = tl.where((kept == worst[:, None]) & (best > worst)[:, None], best[:, None], kept)
            keys = tl.where(keys == best[:, None], LOWEST_KEY, keys)
            best, worst = tl.max(keys, 1), tl.min(kept, 1)
    numbers = ((kept & NO_NODE) ^ NO_NODE).to(tl.int32)
    numbers = tl.sort(tl.where((kept > LOWEST_KEY + NO_NODE) & (o_k < picks)[None, :], numbers, NO_NODE), 1)  # [B, K]
    p_list += (sample * nodes + o_b[:, None]) * picks + o_k[None, :]
    tl.store(p_list, tl.where(numbers < NO_NODE, numbers, -1), mask=m_b[:, None] & (o_k < picks)[None, :])


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels run: NVIDIA Ampere or newer, half precision, head_dim at most 128."""
    return (
        device.type == "cuda"
        and half_precision(dtype)
        and head_dim <= LARGEST_HEAD
        and compute_capability(device.index or 0) >= AMPERE
    )


def select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Lists and counts of `foveate.ops.select_blocks`."""
    real = None if real is None else real.contiguous()
    counts, *lists = _select_blocks(row_contiguous(q), row_contiguous(k), real, top_k, block, levels)
    return lists, counts.split(level_sizes(q.shape[2], block, levels), 1)


@gpu_op("select_blocks")
@recorded
def _select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> list[Tensor]:  # fmt: skip
    means, counts, _ = pool([q, k], real, block, levels)
    return [counts, *pick_nodes(means, counts, q.shape[2], block, levels, top_k)]


@torch.library.register_fake(_select_blocks)
def _(q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int) -> list[Tensor]:
    _, counts, _ = empty_means([q], real, level_starts(q.shape[2], block, levels)[-1])
    return [counts, *empty_lists(q, q.shape[2], block, levels, top_k)]


@recorded
def pick_nodes(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    """Nodes that each node picks, for each level, the finest first: int32 [batch, heads, nodes, picks].

    Args:
        means: Means of the queries, and then of the keys, as `pool` returns them.
        counts: Number of real tokens in each node; empty nodes are never picked.
        tokens: Length of the sequence.
        block: Number of children of a node.
        levels: Number of levels, 1 to 4.
        top_k: Largest number of picks of a node, at most 128: registers hold the lists of all siblings.
    """
    lists = empty_lists(means[0], tokens, block, levels, top_k)
    above = counts
    for level, start in reversed(list(enumerate(level_starts(tokens, block, levels)[:-1]))):
        _launch_select(means, counts, above, lists[level], start, block, level == levels - 1)
        above = lists[level]
    return lists


def empty_lists(x: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    """Uninitialized lists of each level, for the batch and heads of x."""
    sizes = level_sizes(tokens, block, levels)
    return [x.new_empty((*x.shape[:2], nodes, min(top_k, nodes)), dtype=torch.int32) for nodes in sizes]


@launcher
def _launch_select(
    means: Tensor, counts: Tensor, above: Tensor, picked: Tensor, first: int, block: int, top: bool
) -> Launch:
    """Pick nodes of one level, which begins at node `first`, among all its nodes or the children of `above`."""
    (batch, heads, nodes, picks), (_, _, _, all_nodes, dim) = picked.shape, means.shape
    at_once = triton.next_power_of_2(nodes) if top and CANDIDATES < nodes <= AT_TOP else CANDIDATES
    args = (
        means[0], means[1], counts, above, picked, heads, nodes, all_nodes, first,
        0 if len(counts) == 1 else counts.stride(0), above.shape[-1], picks,
    )  # fmt: skip
    constants = {
        "TOP": top, "B": block, "K": triton.next_power_of_2(max(picks, 2)), "BN": at_once, "D": dim,
        "BD": padded_size(dim), "num_warps": block // 16 * at_once // CANDIDATES,
    }  # fmt: skip
    return Launch(_select, (batch * heads * triton.cdiv(nodes, block),), args, constants)


BACKENDS = {"triton": (supports, select_blocks)}
