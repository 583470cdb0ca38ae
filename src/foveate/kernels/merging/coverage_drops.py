# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""How much the gains of all candidates drop when items become better covered, with similarities in registers.

Tensor cores have no float32 products. Each number is split into two bfloat16 numbers, its rounded value and the
remainder, and three of the four products give a similarity about as exact as float32, to 1e-6. Selecting 1,024 of N
items takes about 8 N² similarities: for 100,000 items of 384 channels 61 TFLOP, or 184 TFLOP in three products, which
is 0.3 s at 600 TFLOP/s. Nothing of size N² is written. Items whose coverage did not change are skipped.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from foveate.kernels.launch import AMPERE, Launch, compute_capability, gpu_op, launcher
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "coverage_drops"]

CANDIDATES = ITEMS = 128  # sides of a tile of similarities
CHANNELS, WARPS, STAGES = 64, 8, 3
HALF = torch.bfloat16  # float16 would flush small channels to zero
NUMBERS = ("items", "candidates")  # not specialized when they equal 1
_HALVES: WeakTensorCache[Tensor] = WeakTensorCache()


@triton.jit
def _load(p, o_n, m_n, s_n, o_c):
    return tl.load(p + o_n[:, None].to(tl.int64) * s_n + o_c[None, :], mask=m_n[:, None], other=0.0)


@triton.jit(do_not_specialize=NUMBERS)
def sum_drops(
    p_items, p_candidates, p_before, p_after, p_changed, p_number, p_drops, items, candidates, s_n,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over the changed items of clamp(similarity, before, after) - before, for a tile of candidates."""
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_m < candidates
    p_small_items, p_small_candidates = (
        p_items + items.to(tl.int64) * s_n,
        p_candidates + candidates.to(tl.int64) * s_n,
    )
    changed = tl.load(p_number)
    drops = tl.zeros([BM], tl.float32)
    for tile in range(0, tl.cdiv(changed, BN)):
        o_n = tile * BN + tl.arange(0, BN)
        m_n = o_n < changed
        o_n = tl.load(p_changed + o_n, mask=m_n, other=0)
        similar = tl.zeros([BM, BN], tl.float32)
        for chunk in tl.range(0, s_n // BC, num_stages=STAGES):
            o_c = chunk * BC + tl.arange(0, BC)
            large = _load(p_candidates, o_m, m_m, s_n, o_c)  # [BM, BC]
            small = _load(p_small_candidates, o_m, m_m, s_n, o_c)
            item = tl.trans(_load(p_items, o_n, m_n, s_n, o_c))  # [BC, BN]
            similar = tl.dot(small, item, similar)
            similar = tl.dot(large, tl.trans(_load(p_small_items, o_n, m_n, s_n, o_c)), similar)
            similar = tl.dot(large, item, similar)
        before = tl.load(p_before + o_n, mask=m_n, other=0.0)[None, :]
        after = tl.load(p_after + o_n, mask=m_n, other=0.0)[None, :]
        drops += tl.sum(tl.minimum(tl.maximum(similar, before), after) - before, 1)
    tl.store(p_drops + o_m, drops, mask=m_m)


def supports(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel runs: NVIDIA Ampere or newer, float32."""
    return device.type == "cuda" and dtype == torch.float32 and compute_capability(device.index or 0) >= AMPERE


@gpu_op("coverage_drops")
def coverage_drops(items: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """`foveate.ops.facility_location.portable_drops` on a GPU."""
    drops = _like(items, candidates, before, after)
    if not len(items):
        return drops.zero_()
    if len(candidates):
        changed = after > before
        place = changed.cumsum(0, dtype=torch.int32)
        places = torch.where(changed, place - 1, len(items)).long()
        listed = place.new_empty(len(items) + 1)  # indices of changed items; the last entry collects all others
        listed.scatter_(0, places, torch.arange(len(items), dtype=torch.int32, device=items.device))
        halves = [_HALVES.get([x], HALF, partial(_halves, x)) for x in (items, candidates)]
        _launch(*halves, before.contiguous(), after.contiguous(), listed, place[-1:], drops)
    return drops


@launcher
def _launch(
    items: Tensor, candidates: Tensor, before: Tensor, after: Tensor, listed: Tensor, number: Tensor, drops: Tensor
) -> Launch:
    args = items, candidates, before, after, listed, number, drops, len(before), len(drops), items.shape[2]
    constants = {"BM": CANDIDATES, "BN": ITEMS, "BC": CHANNELS, "STAGES": STAGES, "num_warps": WARPS}
    return Launch(sum_drops, (triton.cdiv(len(drops), CANDIDATES),), args, constants)


@torch.library.register_fake(coverage_drops)
def _like(items: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    return candidates.new_empty(len(candidates))


def _halves(x: Tensor) -> Tensor:
    """Rounded values and remainders [2, rows, channels], padded with zeros to whole steps of channels."""
    x = pad(x, (0, -x.shape[1] % CHANNELS))
    large = x.to(HALF)
    return torch.stack([large, (x - large).to(HALF)])


BACKENDS = {"triton": (supports, coverage_drops)}
