# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Drops in the gains of all candidates when items become better covered, with similarities in registers.

Tensor cores have no float32 products. Each number is split into two bfloat16 numbers, its rounded value and the
remainder, and three of the four products give a similarity about as exact as float32, to 1e-6. Selecting 1,024 of N
items takes about 7.6 N² similarities: for 100,000 items of 384 channels 58 TFLOP, or 175 TFLOP in three products,
0.3 s at 600 TFLOP/s. A tile of 128 x 256 similarities reads 590 KB for 75 MFLOP, 4.7 TB/s at this rate; tiles of
128 x 128 would read 6.3 TB/s, more than the cache delivers. Nothing of size N² is written. Items with changed coverage
are gathered first, so that the copy engine reads them as a matrix.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from foveate.kernels.launch import AMPERE, Launch, compute_capability, gpu_op, launcher, recorded
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "coverage_drops"]

CANDIDATES, ITEMS = 128, 256  # sides of a tile of similarities
CHANNELS, WARPS, STAGES = 32, 8, 4
GATHERED = 32  # items gathered by a program
HALF = torch.bfloat16  # float16 would flush small channels to zero
NUMBERS = ("items", "candidates")  # not specialized when they equal 1
_HALVES: WeakTensorCache[Tensor] = WeakTensorCache()


@triton.jit(do_not_specialize=["items"])
def gather_changed(
    p_items, p_before, p_after, p_place, p_gathered, p_low, p_high, items, s_n,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copy the items with changed coverage, and their coverage before and after, to the first places."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    before = tl.load(p_before + o_n, mask=o_n < items, other=0.0)  # [BN]
    after = tl.load(p_after + o_n, mask=o_n < items, other=0.0)
    changed = after > before
    place = tl.load(p_place + o_n, mask=changed, other=1) - 1
    tl.store(p_low + place, before, mask=changed)
    tl.store(p_high + place, after, mask=changed)
    for half in tl.static_range(2):
        p_from = p_items + (half * items + o_n).to(tl.int64)[:, None] * s_n
        p_to = p_gathered + (half * items + place).to(tl.int64)[:, None] * s_n
        for chunk in range(0, s_n // BC):
            o_c = chunk * BC + tl.arange(0, BC)[None, :]
            tl.store(p_to + o_c, tl.load(p_from + o_c, mask=changed[:, None]), mask=changed[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def sum_drops(
    d_items, d_candidates, p_low, p_high, p_number, p_drops, items, candidates, s_n,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum over the changed items of clamp(similarity, low, high) - low, for a tile of candidates."""
    o_m = tl.program_id(0) * BM
    changed = tl.load(p_number)
    drops = tl.zeros([BM], tl.float32)
    for tile in range(0, tl.cdiv(changed, BN)):
        similar = tl.zeros([BM, BN], tl.float32)
        for chunk in range(0, s_n // BC):
            large = d_candidates.load([o_m, chunk * BC])  # [BM, BC]
            small = d_candidates.load([candidates + o_m, chunk * BC])
            item = d_items.load([tile * BN, chunk * BC]).T  # [BC, BN]
            small_item = d_items.load([items + tile * BN, chunk * BC]).T
            similar = tl.dot(small, item, similar)
            similar = tl.dot(large, small_item, similar)
            similar = tl.dot(large, item, similar)
        o_n = tile * BN + tl.arange(0, BN)
        low = tl.load(p_low + o_n, mask=o_n < changed, other=0.0)[None, :]
        high = tl.load(p_high + o_n, mask=o_n < changed, other=0.0)[None, :]
        drops += tl.sum(tl.minimum(tl.maximum(similar, low), high) - low, 1)
    o_m += tl.arange(0, BM)
    tl.store(p_drops + o_m, drops, mask=o_m < candidates)


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
        place = (after > before).cumsum(0, dtype=torch.int32)
        halves = [_HALVES.get([x], HALF, partial(_halves, x)) for x in (items, candidates)]
        _launch(*halves, before.contiguous(), after.contiguous(), place, drops)
    return drops


@recorded
def _launch(
    items: Tensor, candidates: Tensor, before: Tensor, after: Tensor, place: Tensor, drops: Tensor
) -> Sequence[Tensor]:
    changed = torch.empty_like(items), torch.empty_like(before), torch.empty_like(after)
    _gather(items, before, after, place, *changed)
    _sum(*changed, candidates, place, drops)
    return ()


@launcher
def _gather(
    items: Tensor, before: Tensor, after: Tensor, place: Tensor, gathered: Tensor, low: Tensor, high: Tensor
) -> Launch:
    args = items, before, after, place, gathered, low, high, len(before), items.shape[2]
    return Launch(gather_changed, (triton.cdiv(len(before), GATHERED),), args, {"BN": GATHERED, "BC": CHANNELS})


@launcher
def _sum(items: Tensor, low: Tensor, high: Tensor, candidates: Tensor, place: Tensor, drops: Tensor) -> Launch:
    matrices = [
        TensorDescriptor(x, [2 * x.shape[1], x.shape[2]], [x.shape[2], 1], [rows, CHANNELS])
        for x, rows in ((items, ITEMS), (candidates, CANDIDATES))
    ]
    args = *matrices, low, high, place[-1:], drops, len(low), len(drops), items.shape[2]
    constants = {"BM": CANDIDATES, "BN": ITEMS, "BC": CHANNELS, "num_warps": WARPS, "num_stages": STAGES}
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
