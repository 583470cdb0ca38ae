# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
"""Attention over a schedule in Triton: forward, gradient of the queries, gradients of keys and values.

One program computes one tile of rows of one head. It walks through the steps of columns of its tile: first the full
steps, then the short steps with a mask. Scores are in base 2 (``scale`` includes log2(e)); the stored LSE is natural.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _program(p_tiles, n_tiles, n_long, heads):
    """Batch, head, sample (batch * heads + head), first row, end row, first full step, first short step, end step.

    The long tiles of all heads come first, then the other tiles head by head.
    """
    program = tl.program_id(0)
    samples = tl.num_programs(0) // n_tiles
    first = n_long * samples
    if program < first:
        tile, sample = program % n_long, program // n_long
    else:
        tile, sample = n_long + (program - first) % (n_tiles - n_long), (program - first) // (n_tiles - n_long)
    p_tile = p_tiles + tile * 5
    return (
        (sample // heads).to(tl.int64), (sample % heads).to(tl.int64), sample.to(tl.int64),
        tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2), tl.load(p_tile + 3), tl.load(p_tile + 4),
    )  # fmt: skip


@triton.jit
def _rows(p, stride, first, end, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr):
    """Rows ``first : first + N`` as [N, BD]; zeros from row `end` and from column D."""
    o_n, o_d = tl.arange(0, N), tl.arange(0, BD)
    p_n = p + first.to(tl.int64) * stride + o_n[:, None] * stride + o_d[None, :]  # one 64-bit product is enough
    if MASK:
        return tl.load(p_n, mask=(o_n < end - first)[:, None] & (o_d < D)[None, :], other=0.0)
    if D < BD:
        return tl.load(p_n, mask=(o_d < D)[None, :], other=0.0)
    return tl.load(p_n)


@triton.jit
def _store(p, stride, first, end, x, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    o_n, o_d = tl.arange(0, N), tl.arange(0, BD)
    p_n = p + first.to(tl.int64) * stride + o_n[:, None] * stride + o_d[None, :]  # one 64-bit product is enough
    tl.store(p_n, x.to(p.dtype.element_ty), mask=(o_n < end - first)[:, None] & (o_d < D)[None, :])


@triton.jit
def _attend(
    m, norm, out, q, p_k, p_v, s_k, s_v, first, end, scale,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and output after one more step of online softmax."""
    k = _rows(p_k, s_k, first, end, BN, D, BD, MASK)
    scores = tl.dot(q, tl.trans(k))  # [BM, BN]
    if MASK:
        scores = tl.where((first + tl.arange(0, BN) < end)[None, :], scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.math.exp2(scores * scale - m_new[:, None])
    shrink = tl.math.exp2(m - m_new)
    v = _rows(p_v, s_v, first, end, BN, D, BD, MASK)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    return m_new, norm * shrink + tl.sum(p, 1), out


@triton.jit
def forward(
    p_q, p_k, p_v, p_out, p_lse, p_place, p_tiles, p_steps, scale, n_tiles, n_long, heads, queries,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ob, s_oh, s_o,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    SCATTER: tl.constexpr,
):  # fmt: skip
    """Output and LSE. With SCATTER, the output of query i goes to row ``p_place[i]``."""
    batch, head, sample, row, row_end, full, short, done = _program(p_tiles, n_tiles, n_long, heads)
    p_k += batch * s_kb + head * s_kh
    p_v += batch * s_vb + head * s_vh
    q = _rows(p_q + batch * s_qb + head * s_qh, s_q, row, row_end, BM, D, BD, True)  # [BM, BD]
    m = tl.full([BM], -float("inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BD], tl.float32)
    for step in tl.range(full, short, num_stages=STAGES):
        first = tl.load(p_steps + 2 * step)
        m, norm, out = _attend(m, norm, out, q, p_k, p_v, s_k, s_v, first, first, scale, BN, D, BD, False)
    for step in tl.range(short, done, num_stages=1):
        first, end = tl.load(p_steps + 2 * step), tl.load(p_steps + 2 * step + 1)
        m, norm, out = _attend(m, norm, out, q, p_k, p_v, s_k, s_v, first, end, scale, BN // 2, D, BD, True)
    norm = tl.where(norm > 0, norm, 1.0)  # rows without keys get zeros and an LSE of -inf
    out = out / norm[:, None]
    o_m = row + tl.arange(0, BM)
    p_out += batch * s_ob + head * s_oh
    if SCATTER:
        place = tl.load(p_place + o_m, mask=o_m < row_end, other=0).to(tl.int64)  # [BM]
        o_d = tl.arange(0, BD)
        m_o = (o_m < row_end)[:, None] & (o_d < D)[None, :]
        tl.store(p_out + place[:, None] * s_o + o_d[None, :], out.to(p_out.dtype.element_ty), mask=m_o)
    else:
        _store(p_out, s_o, row, row_end, out, BM, D, BD)
    tl.store(p_lse + sample * queries + o_m, (m + tl.math.log2(norm)) * LN2, mask=o_m < row_end)


@triton.jit
def deltas(
    p_out, p_dout, p_dlse, p_delta, heads, queries, s_ob, s_oh, s_o, s_gb, s_gh, s_g,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """sum(out * dout) - dlse of every query, for both backward passes; without p_dlse, dlse is 0."""
    row, sample = tl.program_id(1) * BM, tl.program_id(0).to(tl.int64)
    batch, head = sample // heads, sample % heads
    out = _rows(p_out + batch * s_ob + head * s_oh, s_o, row, queries, BM, D, BD, True)  # [BM, BD]
    dout = _rows(p_dout + batch * s_gb + head * s_gh, s_g, row, queries, BM, D, BD, True)
    o_m = row + tl.arange(0, BM)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if p_dlse is not None:
        delta -= tl.load(p_dlse + sample * queries + o_m, mask=o_m < queries, other=0.0)
    tl.store(p_delta + sample * queries + o_m, delta, mask=o_m < queries)


@triton.jit
def _query_step(
    dq, q, dout, lse, delta, p_k, p_v, s_k, s_v, first, end, scale,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    k = _rows(p_k, s_k, first, end, BN, D, BD, MASK)
    scores = tl.dot(q, tl.trans(k))  # [BM, BN]
    p = tl.math.exp2(scores * scale - lse[:, None])
    if MASK:
        p = tl.where((first + tl.arange(0, BN) < end)[None, :], p, 0.0)
    v = _rows(p_v, s_v, first, end, BN, D, BD, MASK)
    ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def backward_queries(
    p_q, p_k, p_v, p_dout, p_dq, p_lse, p_delta, p_tiles, p_steps, scale, factor, n_tiles, n_long, heads, queries,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_gb, s_gh, s_g, s_db, s_dh, s_d,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries."""
    batch, head, sample, row, row_end, full, short, done = _program(p_tiles, n_tiles, n_long, heads)
    p_k += batch * s_kb + head * s_kh
    p_v += batch * s_vb + head * s_vh
    q = _rows(p_q + batch * s_qb + head * s_qh, s_q, row, row_end, BM, D, BD, True)  # [BM, BD]
    dout = _rows(p_dout + batch * s_gb + head * s_gh, s_g, row, row_end, BM, D, BD, True)
    o_m = row + tl.arange(0, BM)
    m_m = o_m < row_end
    delta = tl.load(p_delta + sample * queries + o_m, mask=m_m, other=0.0)
    lse = tl.load(p_lse + sample * queries + o_m, mask=m_m, other=0.0) / LN2
    dq = tl.zeros([BM, BD], tl.float32)
    for step in tl.range(full, short, num_stages=STAGES):
        first = tl.load(p_steps + 2 * step)
        dq = _query_step(dq, q, dout, lse, delta, p_k, p_v, s_k, s_v, first, first, scale, BN, D, BD, False)
    for step in tl.range(short, done, num_stages=1):
        first, end = tl.load(p_steps + 2 * step), tl.load(p_steps + 2 * step + 1)
        dq = _query_step(dq, q, dout, lse, delta, p_k, p_v, s_k, s_v, first, end, scale, BN // 2, D, BD, True)
    _store(p_dq + batch * s_db + head * s_dh, s_d, row, row_end, dq * factor, BM, D, BD)


@triton.jit
def _key_step(
    dk, dv, k, v, p_q, p_dout, p_lse, p_delta, s_q, s_g, first, end, scale,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    q = _rows(p_q, s_q, first, end, BN, D, BD, MASK)
    o_n = first + tl.arange(0, BN)
    if MASK:
        lse = tl.load(p_lse + o_n, mask=o_n < end, other=float("inf")) / LN2  # rows past the end get weight 0
        delta = tl.load(p_delta + o_n, mask=o_n < end, other=0.0)
    else:
        lse, delta = tl.load(p_lse + o_n) / LN2, tl.load(p_delta + o_n)
    p = tl.math.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [BM, BN]
    dout = _rows(p_dout, s_g, first, end, BN, D, BD, MASK)
    dv = tl.dot(p.to(dout.dtype), dout, dv)
    ds = p * (tl.dot(v, tl.trans(dout)) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def backward_keys(
    p_q, p_k, p_v, p_dout, p_dk, p_dv, p_lse, p_delta, p_tiles, p_steps, scale, factor,
    n_tiles, n_long, heads, queries,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_gb, s_gh, s_g,
    s_dkb, s_dkh, s_dk, s_dvb, s_dvh, s_dv,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values over the transposed table: each tile of keys walks through its queries."""
    batch, head, sample, row, row_end, full, short, done = _program(p_tiles, n_tiles, n_long, heads)
    p_q += batch * s_qb + head * s_qh
    p_dout += batch * s_gb + head * s_gh
    p_lse += sample * queries
    p_delta += sample * queries
    k = _rows(p_k + batch * s_kb + head * s_kh, s_k, row, row_end, BM, D, BD, True)  # [BM, BD]
    v = _rows(p_v + batch * s_vb + head * s_vh, s_v, row, row_end, BM, D, BD, True)
    dk = tl.zeros([BM, BD], tl.float32)
    dv = tl.zeros([BM, BD], tl.float32)
    for step in tl.range(full, short, num_stages=STAGES):
        first = tl.load(p_steps + 2 * step)
        dk, dv = _key_step(dk, dv, k, v, p_q, p_dout, p_lse, p_delta, s_q, s_g, first, first, scale, BN, D, BD, False)
    for step in tl.range(short, done, num_stages=1):
        first, end = tl.load(p_steps + 2 * step), tl.load(p_steps + 2 * step + 1)
        dk, dv = _key_step(
            dk, dv, k, v, p_q, p_dout, p_lse, p_delta, s_q, s_g, first, end, scale, BN // 2, D, BD, True
        )
    _store(p_dk + batch * s_dkb + head * s_dkh, s_dk, row, row_end, dk * factor, BM, D, BD)
    _store(p_dv + batch * s_dvb + head * s_dvh, s_dv, row, row_end, dv, BM, D, BD)
