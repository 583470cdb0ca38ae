# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Causal attention of some rows over the keys of all tokens: in Triton, and of many rows on Hopper in Gluon.

A program takes a tile of rows of one head. The keys up to the first of its rows are read without a mask, those up to
the last behind one. Tiles of late rows, which read most, start first. Where there are too few tiles for the device, as
for a short prompt, several programs in Triton share the keys of one, and what they found is mixed by their LSE.

The floor of r of T rows of a context, in each layer: their queries and outputs, and every key and value once, through
memory; 4 · heads · dim · r · T / 2 operations if rows lie evenly. 15 % of 32,768 rows of Llama-3.1-8B's shape, 32
layers: 42 TFLOP, and 7 GB, so that products decide.
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
    SMALLEST_DOT,
    Shape,
    fitting,
    like,
    multiprocessors,
    shared_memory,
    side_by_side,
    takes,
    takes_hopper,
)
from foveate.kernels.block.schedule import Schedule, Shares
from foveate.kernels.block.triton_attention import LN2, _rows, _store
from foveate.kernels.gpu_op import gpu_op
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "row_attention"]

FEW = Shape(64, 64, 4, 3), *FORWARD[-2:]  # for tiles of a few rows
LEAST_KEYS = 512  # of a program that shares its tile
PROGRAMS = 2  # on a multiprocessor, at least, where they share tiles
_NUMBERED: WeakTensorCache["_Numbered"] = WeakTensorCache()


@triton.jit
def _attend(
    m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; with a mask a row sees the keys up to its own."""
    k = _rows(p_k, s_k, first, end, BN, D, BD, MASK)
    scores = tl.dot(q, tl.trans(k))  # [BM, BN]
    if MASK:
        scores = tl.where((first + tl.arange(0, BN))[None, :] <= at[:, None], scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    top = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new  # a row may see nothing here
    p = tl.math.exp2(scores * scale - top[:, None])
    shrink = tl.math.exp2(m - top)
    v = _rows(p_v, s_v, first, end, BN, D, BD, MASK)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    return m_new, norm * shrink + tl.sum(p, 1), out


@triton.jit
def attend_rows(
    p_q, p_k, p_v, p_at, p_out, p_lse, scale, heads, share, chosen, keys,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_op, s_ob, s_oh, s_o,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and LSE of a tile of rows over its part of the keys, `keys` of them."""
    sample, part = tl.program_id(0), tl.program_id(2)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    p_k += batch * s_kb + head // share * s_kh
    p_v += batch * s_vb + head // share * s_vh
    o_m = row + tl.arange(0, BM)
    m_m = o_m < chosen
    at = tl.load(p_at + o_m, mask=m_m, other=-1).to(tl.int32)  # [BM]
    start = part * keys
    end = tl.minimum(tl.max(at, 0) + 1, start + keys)
    seen = tl.minimum(tl.min(tl.where(m_m, at, 2**31 - 1), 0) + 1, end)  # by all rows
    steps = tl.maximum(seen - start, 0) // BN
    q = _rows(p_q + batch * s_qb + head * s_qh, s_q, row, chosen, BM, D, BD, True)  # [BM, BD]
    m = tl.full([BM], -float("inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BD], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        first = start + step * BN
        m, norm, out = _attend(m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale, BN, D, BD, False)
    start += steps * BN
    for step in tl.range(0, tl.cdiv(end - start, BN // 2), num_stages=1):
        first = start + step * (BN // 2)
        m, norm, out = _attend(m, norm, out, q, at, p_k, p_v, s_k, s_v, first, end, scale, BN // 2, D, BD, True)
    norm = tl.where(norm > 0, norm, 1.0)  # without keys: zeros, and an LSE of -inf
    p_out += part.to(tl.int64) * s_op + batch * s_ob + head * s_oh
    _store(p_out, s_o, row, chosen, out / norm[:, None], BM, D, BD)
    p_lse += (part.to(tl.int64) * tl.num_programs(0) + sample) * chosen
    tl.store(p_lse + o_m, (m + tl.math.log2(norm)) * LN2, mask=m_m)


@gpu_op("foveate::row_attention")
def row_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, hopper: bool = False) -> Tensor:
    """What `foveate.ops.row_attention` defines; on Hopper's own kernel, if asked for and it takes the work."""
    out = like(q)
    if not out.numel():
        return out
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    q, k, v = map(side_by_side, (q, k, v))
    if hopper and hopper_attention.takes(q, k, v) and (run := _numbered(q, k, rows)):
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        hopper_attention.launch(q, k, v, out, lse, run.schedule, run.shares, scale, run.rows)
    else:
        _in_triton(q, k, v, rows, scale, out)
    return out


@row_attention.register_fake
def _(q: Tensor, *args: object) -> Tensor:
    return like(q)


def _in_triton(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, out: Tensor) -> None:
    """Fill `out`."""
    (batch, heads, chosen, dim), (_, groups, tokens, _) = q.shape, k.shape
    padded = max(SMALLEST_DOT, triton.next_power_of_2(dim))
    shapes = FORWARD if chosen > FEW[0].rows else FEW
    shape = fitting(shapes, 1, padded * q.element_size(), shared_memory(q.device))
    tiles = triton.cdiv(chosen, shape.rows)
    parts = _parts(batch * heads * tiles, tokens, q.device)
    found = out[None] if parts == 1 else torch.empty_like(out[None].expand(parts, -1, -1, -1, -1), dtype=torch.float32)
    lse = q.new_empty(parts, batch, heads, chosen, dtype=torch.float32)
    keys = triton.cdiv(triton.cdiv(tokens, parts), shape.step) * shape.step
    attend_rows[(batch * heads, tiles, parts)](
        q, k, v, rows.contiguous(), found, lse, scale / math.log(2), heads, heads // groups, chosen, keys,
        *(stride for x in (q, k, v) for stride in x.stride()[:3]), *found.stride()[:4],
        D=dim, BD=padded, BM=shape.rows, BN=shape.step, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    if parts > 1:
        out.copy_((found * lse.softmax(0)[..., None]).sum(0))


def _parts(tiles: int, tokens: int, device: torch.device) -> int:
    """Into how many parts keys are cut, so that all multiprocessors have work."""
    return max(1, min(PROGRAMS * multiprocessors(device) // tiles, tokens // LEAST_KEYS))


class _Numbered(NamedTuple):
    """What Hopper's kernel does for rows: the numbers of them, tiles and steps, and the programs, one for a tile."""

    rows: Tensor
    schedule: Schedule
    shares: Shares


def _numbered(q: Tensor, k: Tensor, rows: Tensor) -> _Numbered | None:
    """None if the tiles are too few to keep all multiprocessors busy."""
    samples, chosen, tokens = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    starts = range(0, chosen, hopper_attention.ROWS)
    if samples * len(starts) < multiprocessors(q.device):
        return None
    return _NUMBERED.get([rows], (samples, tokens), lambda: _number(rows, samples, tokens))


def _number(rows: Tensor, samples: int, tokens: int) -> _Numbered:
    """Made on the device: nobody waits for it."""
    short = rows.to(torch.int32, copy=True)  # the cache, whose key `rows` is, must not hold it
    starts = torch.arange(0, len(rows), hopper_attention.ROWS, dtype=torch.int32, device=rows.device)
    ends = (starts + hopper_attention.ROWS).clamp(max=len(rows))
    full, done = (short[starts] + 1) // hopper_attention.STEP, short[ends - 1] // hopper_attention.STEP + 1
    tiles = torch.stack([starts, ends, torch.zeros_like(starts), full, done], 1)
    firsts = torch.arange(0, tokens, hopper_attention.STEP, dtype=torch.int32, device=rows.device)
    steps = torch.stack([firsts, firsts + hopper_attention.STEP], 1)
    work = torch.arange(len(starts) * samples, dtype=torch.int32, device=rows.device)
    shares = Shares(
        torch.stack([len(starts) - 1 - work // samples, work % samples], 1),  # late rows first: they see most
        torch.arange(len(work) + 1, dtype=torch.int32, device=rows.device),
    )
    return _Numbered(short, Schedule(tiles, steps, 0), shares)


# By name: where it runs, and what runs. The last that takes the work is chosen.
BACKENDS = {"triton": (takes, row_attention), "hopper": (takes_hopper, partial(row_attention, hopper=True))}
