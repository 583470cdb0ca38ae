# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Hierarchical block selection: nodes pick top-k nodes, from the coarsest level to the finest, as custom ops.

Scores never leave the registers. `readers_of` transposes the picks for the backward pass over keys.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, gpu_op, half_precision, launcher, padded_size, row_contiguous
from foveate.kernels.log_linear.pooling import level_sizes, level_starts, pool

__all__ = ["BACKENDS", "pick_nodes", "readers_of", "select_blocks", "supports"]

LARGEST_HEAD = 128  # wider heads spill registers

CANDIDATES = 64  # candidates scored at once
AT_TOP = 256  # a top level of at most this many nodes is scored at once, by more warps: it has few programs
RUN, RUNS = 128, 64  # nodes whose picks one program counts, and the largest number of such runs (memory grows with it)
AT_ONCE = 128  # picks counted at once
LOWEST_KEY = tl.constexpr(-(2**63))  # less than the sort key of any score and of any free place in a list
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
    """The picks of B siblings, among all nodes of the top level or among the children of their parent's picks."""
    parents = tl.cdiv(nodes, B)
    parent, sample = tl.program_id(0) % parents, (tl.program_id(0) // parents).to(tl.int64)
    p_q += (sample * all_nodes + first) * D
    p_k += (sample * all_nodes + first) * D
    p_counts += (sample // heads) * s_count + first
    p_above += (sample * parents + parent) * above
    o_b, o_n, o_d, o_k = parent * B + tl.arange(0, B), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, K)
    m_b, m_d = o_b < nodes, (o_d < D)[None, :]
    q = tl.load(p_q + o_b[:, None].to(tl.int64) * D + o_d[None, :], mask=m_b[:, None] & m_d, other=0.0)  # [B, BD]
    # best keys so far: free places hold distinct small keys, places from `picks` on a key that nothing replaces
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
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Lists and counts of `foveate.ops.select_blocks`."""
    tokens = q.shape[2]
    means, counts, _ = pool([row_contiguous(q), row_contiguous(k)], real, block, levels)
    return pick_nodes(means, counts, tokens, block, levels, top_k), counts.split(level_sizes(tokens, block, levels), 1)


@gpu_op("pick_nodes")
def pick_nodes(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    """The nodes that each node picks: for each level, the finest first, int32 [batch, heads, nodes, picks].

    Args:
        means: Means of the queries, and then of the keys, as `pool` returns them.
        counts: Number of real tokens in each node; empty nodes are never picked.
        tokens: Length of the sequence.
        block: Number of children of a node.
        levels: Number of levels, 1 to 4.
        top_k: Largest number of picks of a node, at most 128: registers hold the lists of all siblings.
    """
    batch, heads = means.shape[1:3]
    lists: list[Tensor] = []
    sizes = zip(level_sizes(tokens, block, levels), level_starts(tokens, block, levels), strict=False)
    for nodes, start in reversed(list(sizes)):
        above = lists[0] if lists else counts
        lists.insert(0, _empty(means, batch, heads, nodes, min(top_k, nodes)))
        _launch_select(means, counts, above, lists[0], start, block, len(lists) == 1)
    return lists


@launcher
def _launch_select(
    means: Tensor, counts: Tensor, above: Tensor, picked: Tensor, first: int, block: int, top: bool
) -> Launch:
    """Pick nodes of one level, which begins at node `first`, among all of them or the children of `above`."""
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


@torch.library.register_fake(pick_nodes)
def _(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    sizes = level_sizes(tokens, block, levels)
    return [_empty(means, *means.shape[1:3], nodes, min(top_k, nodes)) for nodes in sizes]


@triton.jit(do_not_specialize=("nodes", "picks", "runs", "run", "first"))
def _place(p_list, p_cells, p_rows, nodes, picks, runs, run, first, K: tl.constexpr, E: tl.constexpr,
           WRITE: tl.constexpr):  # fmt: skip
    """Count the picks of each node in each run of rows, or with WRITE, store the rows that picked each node.

    Cells are [samples, nodes + 1, runs]; the last node stands for missing picks. They hold counts or, with WRITE, the
    next free place in p_rows, counted from `first`. A program handles one run, E picks at a time.
    """
    mine, sample = tl.program_id(0) % runs, (tl.program_id(0) // runs).to(tl.int64)
    o_e = tl.arange(0, E)
    end = tl.minimum(mine * run + run, nodes)
    for start in range(mine * run, end, E // K):
        row, pick = start + o_e // K, o_e % K
        m_e = (row < end) & (pick < picks)
        node = tl.load(p_list + (sample * nodes + row) * picks + pick, mask=m_e, other=0)
        node = tl.where(m_e, tl.where(node >= 0, node, nodes), -1)
        p_cell = p_cells + (sample * (nodes + 1) + node) * runs + mine
        if WRITE:
            earlier = (node[None, :] == node[:, None]) & (o_e[None, :] < o_e[:, None])
            place = tl.load(p_cell, mask=m_e, cache_modifier=".cg") - first  # L1 may be outdated
            tl.store(p_rows + place + tl.sum(earlier.to(tl.int32), 1), row, mask=m_e)
            tl.debug_barrier()
        tl.atomic_add(p_cell, 1, mask=m_e, sem="relaxed")
        if WRITE:
            tl.debug_barrier()


def readers_of(levels: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The nodes that picked each node, for several levels: `foveate.ops.selection.Selection.transpose` of each.

    This is a counting sort: the cumulative counts of all levels give the place of every entry.
    """
    samples, sizes = levels[0][:, :, 0, 0].numel(), [lists.shape[2:] for lists in levels]
    runs = [min(RUNS, triton.cdiv(nodes, RUN)) for nodes, _ in sizes]
    cells = [samples * (nodes + 1) * count for (nodes, _), count in zip(sizes, runs, strict=True)]
    counts = levels[0].new_zeros(1 + sum(cells))
    firsts = list(accumulate((lists.numel() for lists in levels), initial=0))
    for lists, cell, first, count in zip(levels, accumulate(cells, initial=1), firsts, runs, strict=False):
        _launch_place(lists, counts, lists, cell, first, count, False)
    starts = counts.cumsum(0, dtype=torch.int32)
    found = []
    for lists, cell, first, count in zip(levels, accumulate(cells, initial=0), firsts, runs, strict=False):
        nodes, entries = lists.shape[2], lists[0, 0].numel()
        base = torch.arange(first, first + lists.numel(), entries, dtype=torch.int32, device=lists.device)
        mine = starts[cell : cell + samples * (nodes + 1) * count].view(samples, -1, count)[..., 0]
        rows = _empty(lists, *lists.shape[:2], entries)
        found.append(((mine - base[:, None]).view(*lists.shape[:2], -1), rows))
        _launch_place(lists, starts, rows, cell, first, count, True)
    return found


@launcher
def _launch_place(lists: Tensor, cells: Tensor, rows: Tensor, cell: int, first: int, runs: int, write: bool) -> Launch:
    """Count the picks of one level in `cells`, from entry `cell` on, or store in `rows` the nodes that picked."""
    batch, heads, nodes, picks = lists.shape
    most = triton.next_power_of_2(picks)
    args = lists, cells[cell:], rows, nodes, picks, runs, triton.cdiv(nodes, runs), first
    constants = {"K": most, "E": max(most, AT_ONCE), "WRITE": write}
    return Launch(_place, (batch * heads * runs,), args, constants)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


BACKENDS = {"triton": (supports, select_blocks)}
