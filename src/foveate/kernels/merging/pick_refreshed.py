# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Greedy selection among a few candidates whose similarities to all items were just computed.

Three kernels replace about forty of PyTorch. A pick reads the similarities of each item to 32 candidates: 13 MB for
100,000 items, which stay in the L2 cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import AMPERE, Launch, compute_capability, launcher, recorded

__all__ = ["BACKENDS", "pick_refreshed"]

ITEMS, WARPS = 256, 8  # items of a program, and its warps
PARTS = 128  # partial sums added at a time
LARGEST = 2**63 - 1
NUMBERS = "items", "parts", "turns", "refreshed", "classes"  # not specialized when they equal 1


@triton.jit(do_not_specialize=NUMBERS)
def sum_gains(
    p_similar, p_covered, p_block, p_certain, p_parts, items, refreshed, rounding,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gain of each refreshed candidate, summed over a part of the items."""
    if tl.load(p_certain):
        o_r = tl.arange(0, BR)
        o_n = tl.program_id(0) * BN + tl.arange(0, BN)
        covered = tl.load(p_covered + tl.load(p_block) * items + o_n, mask=o_n < items, other=0.0)  # [BN]
        m_similar = (o_r < refreshed)[:, None] & (o_n < items)[None, :]
        similar = tl.load(p_similar + o_r.to(tl.int64)[:, None] * items + o_n[None, :], mask=m_similar, other=0.0)
        more = similar - covered[None, :]  # [BR, BN]
        gains = tl.sum(tl.where(m_similar & (more > rounding), more, 0.0), 1)
        tl.store(p_parts + tl.program_id(0) * BR + o_r, gains)


@triton.jit(do_not_specialize=NUMBERS)
def pick_best(
    p_parts, p_refreshed, p_others, p_bonus, p_block, p_classes, p_room,
    p_certain, p_row, p_turn, p_picks, p_gains, parts, refreshed, turns, classes, tie,
    BR: tl.constexpr, BP: tl.constexpr, LARGEST: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Pick the best refreshed candidate if no other can be as good."""
    if tl.load(p_certain):
        o_r = tl.arange(0, BR)
        m_r = o_r < refreshed
        total = tl.zeros([BR], tl.float32)
        for part in range(0, parts, BP):
            o_p = part + tl.arange(0, BP)
            total += tl.sum(tl.load(p_parts + o_p[:, None] * BR + o_r, mask=(o_p < parts)[:, None], other=0.0), 0)
        candidate = tl.load(p_refreshed + o_r, mask=m_r, other=0)  # [BR]
        total += tl.load(p_bonus + candidate)
        p_room += tl.load(p_block) * classes
        if ROOM:
            total = tl.where(tl.load(p_room + tl.load(p_classes + candidate)) < 1, float("-inf"), total)
        total = tl.where(m_r, total, float("-inf"))
        best = tl.max(total, 0)
        enough = best - tie * tl.abs(best)
        pick = tl.min(tl.where(m_r & (total >= enough), candidate, LARGEST), 0)
        picked = m_r & (candidate == pick)
        turn = tl.load(p_turn)
        certain = (enough > tl.load(p_others)) & (turn < turns)
        tl.store(p_certain, certain)
        if certain:
            tl.store(p_row, tl.sum(tl.where(picked, o_r, 0), 0))
            tl.store(p_picks + turn, pick)
            tl.store(p_gains + turn, tl.sum(tl.where(picked, total, 0.0), 0))
            tl.store(p_bonus + pick, float("-inf"))
            tl.store(p_turn, turn + 1)
            if ROOM:
                p_room += tl.load(p_classes + pick)
                tl.store(p_room, tl.load(p_room) - 1)


@triton.jit(do_not_specialize=NUMBERS)
def cover(p_similar, p_covered, p_block, p_certain, p_row, items, BN: tl.constexpr):
    """Raise the coverage of a part of the items to their similarity to the pick."""
    if tl.load(p_certain):
        o_n = tl.program_id(0) * BN + tl.arange(0, BN)
        similar = tl.load(p_similar + tl.load(p_row).to(tl.int64) * items + o_n, mask=o_n < items)
        p_covered += tl.load(p_block) * items
        tl.store(p_covered + o_n, tl.maximum(tl.load(p_covered + o_n, mask=o_n < items), similar), mask=o_n < items)


def supports(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernels run: NVIDIA Ampere or newer, float32."""
    return device.type == "cuda" and dtype == torch.float32 and compute_capability(device.index or 0) >= AMPERE


def pick_refreshed(greedy: Any, tie: float, rounding: float) -> None:
    """`foveate.ops.facility_location.portable_pick` on a GPU."""
    state = greedy.block, greedy.certain
    best = greedy.refreshed, greedy.others, greedy.bonus, greedy.classes, greedy.room
    made = greedy.turn, greedy.picks, greedy.gains
    _launch(greedy.similar, greedy.covered, state, best, made, tie, rounding)


@recorded
def _launch(
    similar: Tensor,
    covered: Tensor,
    state: tuple[Tensor, Tensor],
    best: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    made: tuple[Tensor, Tensor, Tensor],
    tie: float,
    rounding: float,
) -> Sequence[Tensor]:
    refreshed, items = similar.shape
    parts = similar.new_empty(triton.cdiv(items, ITEMS), triton.next_power_of_2(refreshed))
    row = similar.new_empty(1, dtype=torch.int32)
    _sum(similar, covered, state, parts, rounding)
    _pick(parts, state, best, row, made, tie)
    _cover(similar, covered, state, row)
    return ()


@launcher
def _sum(similar: Tensor, covered: Tensor, state: tuple[Tensor, Tensor], parts: Tensor, rounding: float) -> Launch:
    args = similar, covered, *state, parts, similar.shape[1], similar.shape[0], rounding
    return Launch(sum_gains, (len(parts),), args, {"BR": parts.shape[1], "BN": ITEMS, "num_warps": WARPS})


@launcher
def _pick(parts: Tensor, state: Any, best: Any, row: Tensor, made: Any, tie: float) -> Launch:
    (block, certain), (refreshed, others, bonus, classes, room) = state, best
    limits = (refreshed, made[0]) if room is None else (classes, room)
    args = (
        parts, refreshed, others, bonus, block, *limits, certain, row, *made,
        len(parts), len(refreshed), len(made[1]), 0 if room is None else room.shape[1], tie,
    )  # fmt: skip
    constants = {"BR": parts.shape[1], "BP": PARTS, "LARGEST": LARGEST, "ROOM": room is not None, "num_warps": WARPS}
    return Launch(pick_best, (1,), args, constants)


@launcher
def _cover(similar: Tensor, covered: Tensor, state: tuple[Tensor, Tensor], row: Tensor) -> Launch:
    args = similar, covered, *state, row, similar.shape[1]
    return Launch(cover, (triton.cdiv(similar.shape[1], ITEMS),), args, {"BN": ITEMS, "num_warps": WARPS})


BACKENDS = {"triton": (supports, pick_refreshed)}
