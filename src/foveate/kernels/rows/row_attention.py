# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Causal attention of some rows of a sequence over all its keys: a Triton kernel, and the Hopper kernel for many rows.

One program computes a tile of rows of one head. It reads the keys up to its first row without a mask and the keys up
to its last row with a mask. Tiles of late rows read the most keys and start first. If there are too few tiles for the
GPU, as with a short prompt, several Triton programs split the keys of one tile, and their results are combined by LSE.

Lower bound for r of T rows, per layer: 4 · heads · dim · r · T / 2 operations if the rows are spread evenly, and every
query, output, key and value moved once. For 15 % of 32,768 rows and the 32 layers of Llama-3.1-8B, this means 42 TFLOP
and 7 GB, so the kernel is compute-bound.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.block import hopper_attention
from foveate.kernels.block.block_attention import (
    FORWARD,
    KernelConfig,
    first_that_fits,
    supports,
    supports_hopper,
)
from foveate.kernels.block.schedule import Schedule
from foveate.kernels.block.triton_attention import LN2, _rows, _store
from foveate.kernels.launch import (
    Launch,
    empty_like,
    empty_lse,
    gpu_op,
    launcher,
    multiprocessors,
    padded_size,
    row_contiguous,
    shared_memory,
)
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "row_attention"]

FEW = KernelConfig(64, 64, 4, 3), *FORWARD[-2:]  # for few rows
LEAST_KEYS = 512  # fewest keys of a program when several split one tile
PROGRAMS = 2  # programs per multiprocessor to aim for when they split tiles
_TILINGS: WeakTensorCache["_Tiling"] = WeakTensorCache()


@triton.jit
def _attend(
    m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale, window,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One step of online softmax. With MASK, a row reads the keys up to its position; with WINDOW, only the last."""
    k = _rows(p_k, s_k, first, end, BN, D, BD, MASK)
    scores = tl.dot(q, tl.trans(k))  # [BM, BN]
    if MASK:
        distance = at[:, None] - (first + tl.arange(0, BN))[None, :]
        scores = tl.where((distance >= 0) & ((distance < window) | (not WINDOW)), scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    top = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new  # a row may have no visible key in this step
    p = tl.math.exp2(scores * scale - top[:, None])
    shrink = tl.math.exp2(m - top)
    v = _rows(p_v, s_v, first, end, BN, D, BD, MASK)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    return m_new, norm * shrink + tl.sum(p, 1), out


@triton.jit
def attend_rows(
    p_q, p_k, p_v, p_at, p_out, p_lse, scale, heads, share, chosen, keys, window,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_at, s_op, s_ob, s_oh, s_o,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Output and LSE of a tile of rows over one part of the keys, `keys` of them."""
    sample, part = tl.program_id(0), tl.program_id(2)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    p_k += batch * s_kb + head // share * s_kh
    p_v += batch * s_vb + head // share * s_vh
    o_m = row + tl.arange(0, BM)
    m_m = o_m < chosen
    at = tl.load(p_at + batch * s_at + o_m, mask=m_m, other=-1).to(tl.int32)  # [BM]
    start = part * keys
    end = tl.minimum(tl.max(at, 0) + 1, start + keys)
    least = tl.min(tl.where(m_m, at, 2**31 - 1), 0)
    shared = tl.minimum(least + 1, end)  # visible to all rows
    steps = tl.maximum(shared - start, 0) // BN
    if WINDOW:  # few keys, all of them with a mask
        start, steps = tl.maximum(start, (least + 1 - window) // (BN // 2) * (BN // 2)), 0
    q = _rows(p_q + batch * s_qb + head * s_qh, s_q, row, chosen, BM, D, BD, True)  # [BM, BD]
    m = tl.full([BM], -float("inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BD], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = start + step * BN
        m, norm, out = _attend(
            m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale, window, BN, D, BD, False, False
        )
    start += steps * BN
    for step in tl.range(0, tl.cdiv(end - start, BN // 2), num_stages=1):
        first = start + step * (BN // 2)
        m, norm, out = _attend(
            m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale, window, BN // 2, D, BD, True, WINDOW
        )
    norm = tl.where(norm > 0, norm, 1.0)  # rows without keys: zeros and an LSE of -inf
    p_out += part.to(tl.int64) * s_op + batch * s_ob + head * s_oh
    _store(p_out, s_o, row, chosen, out / norm[:, None], BM, D, BD)
    p_lse += (part.to(tl.int64) * tl.num_programs(0) + sample) * chosen
    tl.store(p_lse + o_m, (m + tl.math.log2(norm)) * LN2, mask=m_m)


@gpu_op("row_attention")
def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    with_lse: bool = False,
    hopper: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output of `foveate.ops.row_attention` and, with `with_lse`, LSE.

    With `hopper`, by the Hopper kernel if it can address the tensors.
    """
    out = empty_like(q)
    if not out.numel():
        return out, empty_lse(q)
    if scale < 0:  # kernels take the running maximum of unscaled scores
        q, scale = -q, -scale
    q, k, v = map(row_contiguous, (q, k, v))
    hopper = hopper and window is None and hopper_attention.addressable(q, k, v)
    # if rows differ between samples, each sample is one launch
    samples = [slice(None)] if rows.ndim == 1 else [slice(i, i + 1) for i in range(len(rows))]
    tilings = [tiling for some in samples if hopper and (tiling := _tiling(q[some], k, rows, some.start))]
    if len(tilings) == len(samples):
        lse = empty_lse(q)[None]
        for some, tiling in zip(samples, tilings, strict=True):
            one = q[some], k[some], v[some], out[some], lse[0, some]
            hopper_attention.launch(*one, tiling.schedule, scale, tiling.positions)
    else:
        lse = _launch_triton(q, k, v, rows, scale, window, out)
    if sinks is not None:  # logits without a value
        out *= torch.sigmoid(lse.logsumexp(0) - sinks.float()[:, None])[..., None]
    return out, lse.logsumexp(0) if with_lse and len(lse) > 1 else lse[0]


@torch.library.register_fake(row_attention)
def _(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return empty_like(q), empty_lse(q)


def _launch_triton(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, window: int | None, out: Tensor
) -> Tensor:
    """Write `out`. Returns the LSE of each part of the keys."""
    (batch, heads, chosen, dim), tokens = q.shape, k.shape[2]
    configs = FORWARD if chosen > FEW[0].rows else FEW
    config = first_that_fits(configs, 1, padded_size(dim) * q.element_size(), shared_memory(q.device))
    tiles = triton.cdiv(chosen, config.rows)
    parts = _parts(batch * heads * tiles, tokens, q.device)
    partial_out = out[None]
    if parts > 1:
        partial_out = torch.empty_like(partial_out.expand(parts, -1, -1, -1, -1), dtype=torch.float32)
    lse = q.new_empty(parts, batch, heads, chosen, dtype=torch.float32)
    _launch_rows(q, k, v, rows.contiguous(), partial_out, lse, scale, window, config)
    if parts > 1:
        out.copy_((partial_out * lse.softmax(0)[..., None]).sum(0))
    return lse


@launcher
def _launch_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, out: Tensor, lse: Tensor, scale: float, window: int | None,
    config: KernelConfig,
) -> Launch:  # fmt: skip
    """Attention of the rows over each of ``len(out)`` parts of the keys."""
    (batch, heads, chosen, dim), (_, groups, tokens, _), parts = q.shape, k.shape, len(out)
    keys = triton.cdiv(triton.cdiv(tokens, parts), config.step) * config.step
    args = (
        q, k, v, rows, out, lse, scale / math.log(2), heads, heads // groups, chosen, keys,
        window or 0, *(stride for x in (q, k, v) for stride in x.stride()[:3]), rows.stride(0) * (rows.ndim - 1),
        *out.stride()[:4],
    )  # fmt: skip
    constants = {
        "D": dim, "BD": padded_size(dim), "BM": config.rows, "BN": config.step, "STAGES": config.stages,
        "WINDOW": window is not None, "num_warps": config.warps,
    }  # fmt: skip
    return Launch(attend_rows, (batch * heads, triton.cdiv(chosen, config.rows), parts), args, constants)


def _parts(tiles: int, tokens: int, device: torch.device) -> int:
    """Number of parts to split the keys into, so that all multiprocessors have work."""
    return max(1, min(PROGRAMS * multiprocessors(device) // tiles, tokens // LEAST_KEYS))


class _Tiling(NamedTuple):
    """Positions of rows, and a schedule with one program per tile, for the Hopper kernel."""

    positions: Tensor
    schedule: Schedule


def _tiling(q: Tensor, k: Tensor, rows: Tensor, sample: int | None) -> _Tiling | None:
    """The cached tiles, or None if there are too few tiles to keep all multiprocessors busy."""
    samples, chosen, tokens = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    if samples * triton.cdiv(chosen, hopper_attention.ROWS) < multiprocessors(q.device):
        return None
    key = samples, tokens, sample
    return _TILINGS.get([rows], key, lambda: _make_tiling(rows if sample is None else rows[sample], samples, tokens))


def _make_tiling(rows: Tensor, samples: int, tokens: int) -> _Tiling:
    """The tiles, computed on the device without synchronization."""
    positions = rows.to(torch.int32, copy=True)  # a copy, because the cache must not hold its own key
    ints = {"dtype": torch.int32, "device": rows.device}
    starts = torch.arange(0, len(rows), hopper_attention.ROWS, **ints)
    ends = (starts + hopper_attention.ROWS).clamp(max=len(rows))
    full = (positions[starts] + 1) // hopper_attention.STEP
    done = positions[ends - 1] // hopper_attention.STEP + 1
    tiles = torch.stack([starts, ends, torch.zeros_like(starts), full, done], 1)
    firsts = torch.arange(0, tokens, hopper_attention.STEP, **ints)
    steps = torch.stack([firsts, firsts + hopper_attention.STEP], 1)
    items = torch.arange(len(starts) * samples, **ints)
    work = torch.stack([len(starts) - 1 - items // samples, items % samples], 1)  # late rows first: they read the most
    return _Tiling(positions, Schedule(tiles, steps, items=work, bounds=torch.arange(len(items) + 1, **ints)))


BACKENDS = {"triton": (supports, row_attention), "hopper": (supports_hopper, partial(row_attention, hopper=True))}
