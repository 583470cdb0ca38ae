# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Queries, keys and values in FP8, as `foveate.ops.fp8` defines it: one launch reads them once and writes them once.

A second launch looks at what the first one saw, settles the scale of each head, and rounds those heads again that
exceeded their guess. It usually ends at once.

Values are stored as [head_dim, keys], because tensor cores take FP8 only with the summed dimension last. Each run of
16 keys is in the order in which a thread holds their weights, so that weights need not move between threads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, launcher, row_contiguous
from foveate.ops.fp8 import E4M3, LARGEST, MARGIN, SAMPLES, SMALLEST

__all__ = ["Rounded", "round_inputs"]

ROWS, WARPS = 128, 8  # tokens and warps of a program
PROGRAMS = 4  # that settle one head
ALIGNED = 64  # keys are padded to a multiple of this

MOST, LEAST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
SOME, SLACK = tl.constexpr(SAMPLES), tl.constexpr(MARGIN)


class Rounded(NamedTuple):
    """Inputs of attention in e4m3, contiguous.

    Attributes:
        q: Queries [batch, heads, queries, head_dim].
        k: Keys [batch, heads, keys, head_dim].
        v: Values [batch, heads, head_dim, keys, padded to a multiple of `ALIGNED`].
        q_scale: Scale of each query [batch, heads, queries].
        scales: Scale of keys and values of each head [batch, heads, 2].
        means: What was subtracted from keys and values of each head [batch, heads, 2, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    scales: Tensor
    means: Tensor


@triton.jit
def _rows(p_x, row, stride, end, D: tl.constexpr):
    p_row = p_x + row.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(p_row, mask=(row < end)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _guess(p_x, stride, tokens, D: tl.constexpr):
    """Mean [D] of a sample of a head, and the range around it in which all tokens are expected."""
    some = _rows(p_x, (tl.arange(0, SOME).to(tl.int64) * tokens // SOME).to(tl.int32), stride, tokens, D)
    mean = tl.sum(some, 0) / SOME
    return mean, SLACK * tl.max(tl.max(tl.abs(some - mean[None, :]), 1), 0)


@triton.jit
def _scale(largest):
    return tl.maximum(largest, LEAST) / MOST


@triton.jit
def _round_queries(p_x, p_out, p_scale, sample, tile, stride, tokens, D: tl.constexpr, BT: tl.constexpr):
    row = tile * BT + tl.arange(0, BT)
    x = _rows(p_x, row, stride, tokens, D)  # [BT, D]
    scale = _scale(tl.max(tl.abs(x), 1))
    o_row = sample.to(tl.int64) * tokens + row
    tl.store(p_scale + o_row, scale, mask=row < tokens)
    p_row = p_out + o_row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(p_row, (x * (1 / scale)[:, None]).to(tl.float8e4nv), mask=(row < tokens)[:, None])


@triton.jit
def _round_tokens(
    p_x, p_out, sample, tile, stride, tokens, padded, mean, scale, D: tl.constexpr, BT: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Round a tile of keys or values of a head; returns its largest difference from the mean."""
    place, dim = tile * BT + tl.arange(0, BT), tl.arange(0, D)
    row = place
    if VALUES:  # a thread holds weights 2t, 2t + 1, 2t + 8 and 2t + 9 of 16
        row = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    x = tl.where((row < tokens)[:, None], _rows(p_x, row, stride, tokens, D) - mean[None, :], 0.0)  # [BT, D]
    rounded = (x * (1 / scale)).to(tl.float8e4nv)
    if VALUES:
        p_column = p_out + (sample.to(tl.int64) * D + dim)[:, None] * padded + place[None, :]
        tl.store(p_column, tl.trans(rounded), mask=(place < padded)[None, :])
    else:
        p_row = p_out + (sample.to(tl.int64) * tokens + place)[:, None] * D + dim[None, :]
        tl.store(p_row, rounded, mask=(place < tokens)[:, None])
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def _guess_and_round(
    p_x, p_out, p_largest, sample, tile, stride, tokens, padded, tiles, D: tl.constexpr, BT: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    mean, guess = _guess(p_x, stride, tokens, D)
    scale = _scale(guess)
    largest = _round_tokens(p_x, p_out, sample, tile, stride, tokens, padded, mean, scale, D, BT, VALUES)
    tl.store(p_largest + (2 * sample + VALUES) * tiles + tile, largest)


@triton.jit
def round_all(
    p_q, p_k, p_v, p_q8, p_k8, p_v8, p_scale, p_largest, heads, queries, keys, padded, tiles,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A tile of one head; program axis 2 chooses queries, keys or values."""
    tile, sample, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    if which == 0:
        _round_queries(p_q + batch * s_qb + head * s_qh, p_q8, p_scale, sample, tile, s_q, queries, D, BT)
    elif which == 1:
        p_x = p_k + batch * s_kb + head * s_kh
        _guess_and_round(p_x, p_k8, p_largest, sample, tile, s_k, keys, padded, tiles, D, BT, False)
    else:
        p_x = p_v + batch * s_vb + head * s_vh
        _guess_and_round(p_x, p_v8, p_largest, sample, tile, s_v, keys, padded, tiles, D, BT, True)


@triton.jit
def _settle(
    p_x, p_out, p_largest, p_scales, p_means, sample, stride, tokens, padded, tiles, D: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    which, o_r = 2 * sample + VALUES, tl.arange(0, BR)
    mean, guess = _guess(p_x, stride, tokens, D)
    largest = tl.max(tl.load(p_largest + which * tiles + o_r, mask=o_r * BT < padded, other=0.0), 0)
    scale = _scale(tl.maximum(largest, guess))
    if tl.program_id(0) == 0:
        tl.store(p_scales + which, scale)
        tl.store(p_means + which * D + tl.arange(0, D), mean)
    if largest > guess:
        for tile in range(tl.program_id(0), tl.cdiv(padded, BT), tl.num_programs(0)):
            _round_tokens(p_x, p_out, sample, tile, stride, tokens, padded, mean, scale, D, BT, VALUES)


@triton.jit
def settle(
    p_k, p_v, p_k8, p_v8, p_largest, p_scales, p_means, heads, keys, padded, tiles,
    s_kb, s_kh, s_k, s_vb, s_vh, s_v, D: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Means and scales of a head; program axis 2 chooses keys or values."""
    sample = tl.program_id(1)
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    if tl.program_id(2) == 0:
        p_x = p_k + batch * s_kb + head * s_kh
        _settle(p_x, p_k8, p_largest, p_scales, p_means, sample, s_k, keys, padded, tiles, D, BT, BR, False)
    else:
        p_x = p_v + batch * s_vb + head * s_vh
        _settle(p_x, p_v8, p_largest, p_scales, p_means, sample, s_v, keys, padded, tiles, D, BT, BR, True)


def round_inputs(q: Tensor, k: Tensor, v: Tensor) -> Rounded:
    """Queries, keys and values [batch, heads, tokens, head_dim], head_dim a power of 2, in e4m3."""
    q, k, v = map(row_contiguous, (q, k, v))
    batch, heads, keys, head_dim = k.shape
    padded = triton.cdiv(keys, ALIGNED) * ALIGNED
    tiles = triton.cdiv(max(q.shape[2], padded), ROWS)
    rounded = Rounded(
        q=q.new_empty(q.shape, dtype=E4M3),
        k=k.new_empty(k.shape, dtype=E4M3),
        v=v.new_empty(batch, heads, head_dim, padded, dtype=E4M3),
        q_scale=q.new_empty(q.shape[:3], dtype=torch.float32),
        scales=q.new_empty(batch, heads, 2, dtype=torch.float32),
        means=q.new_empty(batch, heads, 2, head_dim, dtype=torch.float32),
    )
    largest = q.new_empty(batch, heads, 2, tiles, dtype=torch.float32)
    _launch_round(q, k, v, *rounded[:4], largest)
    _launch_settle(k, v, *rounded[1:3], largest, *rounded[4:])
    return rounded


@launcher
def _launch_round(
    q: Tensor, k: Tensor, v: Tensor, q8: Tensor, k8: Tensor, v8: Tensor, q_scale: Tensor, largest: Tensor
) -> Launch:
    batch, heads, queries, head_dim = q.shape
    tiles = largest.shape[3]
    sizes = heads, queries, k.shape[2], v8.shape[3], tiles
    args = q, k, v, q8, k8, v8, q_scale, largest, *sizes, *(stride for x in (q, k, v) for stride in x.stride()[:3])
    return Launch(round_all, (tiles, batch * heads, 3), args, {"D": head_dim, "BT": ROWS, "num_warps": WARPS})


@launcher
def _launch_settle(
    k: Tensor, v: Tensor, k8: Tensor, v8: Tensor, largest: Tensor, scales: Tensor, means: Tensor
) -> Launch:
    batch, heads, keys, head_dim = k.shape
    tiles = largest.shape[3]
    sizes = heads, keys, v8.shape[3], tiles
    args = k, v, k8, v8, largest, scales, means, *sizes, *(stride for x in (k, v) for stride in x.stride()[:3])
    constants = {"D": head_dim, "BT": ROWS, "BR": triton.next_power_of_2(tiles), "num_warps": WARPS}
    return Launch(settle, (PROGRAMS, batch * heads, 2), args, constants)
