# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Causal attention of some rows over the keys of all tokens, in Triton.

A program takes a tile of rows of one head. The keys up to the first of its rows are read without a mask, those up to
the last behind one. Tiles of late rows, which read most, start first. Where there are too few tiles for the device, as
for a short prompt, several programs share the keys of one, and what they found is mixed by their LSE.

The floor of r of T rows of a context, in each layer: their queries and outputs, and every key and value once, through
memory; 4 · heads · dim · r · T / 2 operations if rows lie evenly. 15 % of 32,768 rows of Llama-3.1-8B's shape, 32
layers: 42 TFLOP, and 7 GB, so that products decide.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.block_attention import (
    FORWARD,
    SMALLEST_DOT,
    Shape,
    fitting,
    like,
    shared_memory,
    side_by_side,
    takes,
)
from foveate.kernels.triton_attention import LN2, _rows, _store

__all__ = ["BACKENDS", "row_attention"]

FEW = Shape(64, 64, 4, 3), *FORWARD[-2:]  # for tiles of a few rows
LEAST_KEYS = 512  # of a program that shares its tile
PROGRAMS = 2  # on a multiprocessor, at least, where they share tiles


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


@torch.library.custom_op("foveate::row_attention", mutates_args=())
def row_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float) -> Tensor:
    """What `foveate.ops.row_attention` defines."""
    out = like(q)
    if not out.numel():
        return out
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    q, k, v = map(side_by_side, (q, k, v))
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
    return out


@row_attention.register_fake
def _(q: Tensor, *args: object) -> Tensor:
    return like(q)


def _parts(tiles: int, tokens: int, device: torch.device) -> int:
    """Into how many parts keys are cut, so that all multiprocessors have work."""
    if device.type != "cuda":
        return 1
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(programs // tiles, tokens // LEAST_KEYS))


BACKENDS = {"triton": (takes, row_attention)}
