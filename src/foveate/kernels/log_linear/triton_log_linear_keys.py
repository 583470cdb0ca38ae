# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Gradients of keys and values of log-linear attention in Triton.

One program computes a tile of keys that the same queries read: a block of tokens, the children of a node, or a tile of
keys that all queries read. It walks through the queries of the nodes that picked the tile. A tile that more than one
chunk of queries reads is split into parts, one program per chunk, and the parts are added up in a fixed order.
"""

import triton
import triton.language as tl

from foveate.kernels.log_linear.triton_log_linear import NEVER, less_picked, rows_of

NUMBERS = ("heads", "tokens", "limit", "all_nodes", "shift", "picks", "chunk", "parts")  # not specialized at 1


@triton.jit
def _queries(p_readers, p_real, at, end, shift, tokens, LISTED: tl.constexpr, MASKED: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """Indices of BM queries from place `at` in the concatenated runs of all readers; -1 where there is none."""
    o_q = at + tl.arange(0, BM)
    m_q = o_q < end
    if LISTED:
        first = tl.load(p_readers + (o_q >> shift), mask=m_q, other=0) << shift
        o_q = first + (o_q & ((1 << shift) - 1))
    m_q = m_q & (o_q < tokens)
    if MASKED:
        m_q = m_q & (tl.load(p_real + o_q, mask=m_q, other=0) != 0)
    return tl.where(m_q, o_q, -1)


@triton.jit
def _key_step(
    dk, dv, k, v, p_q, p_g, p_binary, p_delta, s_q, s_g, o_q, bias, scale,
    MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    o_r = o_q if MASKED else tl.maximum(o_q, 0)
    q = rows_of(p_q, s_q, o_r, D, BD, FAR, MASKED)  # [BM, BD]
    binary = tl.load(p_binary + o_q, mask=o_q >= 0, other=float("inf"))
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + bias  # [BT, BM]
    p = tl.math.exp2(scores - binary[None, :])
    g = rows_of(p_g, s_g, o_r, D, BD, FAR, MASKED)
    dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
    delta = tl.load(p_delta + o_q, mask=o_q >= 0, other=0.0)
    ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _of_means(p_means, p_counts, tile, tokens, B: tl.constexpr, ENRICHED: tl.constexpr, D: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    """Gradient [BD] that each token of a block receives from the means of its ancestors."""
    o_d = tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    nodes, node = tl.cdiv(tokens, B), tile
    for _ in tl.static_range(ENRICHED):
        count = tl.maximum(tl.load(p_counts + node), 1)
        total += tl.load(p_means + node.to(tl.int64) * D + o_d, mask=o_d < D, other=0.0) / count
        p_means += nodes.to(tl.int64) * D
        p_counts += nodes
        nodes, node = tl.cdiv(nodes, B), node // B
    return total


@triton.jit
def _finish(
    p_dk, p_dv, s_dk, s_dv, dk, dv, p_dmk, p_dmv, p_counts, o_t, limit, real, tile, tokens,
    FOLD: tl.constexpr, ENRICHED: tl.constexpr, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the keys o_t; with FOLD (tokens), add what they receive from the means."""
    if FOLD:
        dk += _of_means(p_dmk, p_counts, tile, tokens, B, ENRICHED, D, BD)[None, :]
        dv += _of_means(p_dmv, p_counts, tile, tokens, B, ENRICHED, D, BD)[None, :]
        dk, dv = tl.where(real[:, None], dk, 0.0), tl.where(real[:, None], dv, 0.0)
    o_t = tl.where(o_t < limit, o_t, -1)
    _store(p_dk, s_dk, o_t, dk, D, BD)
    _store(p_dv, s_dv, o_t, dv, D, BD)


@triton.jit
def _store(p, stride, o_n, x, D: tl.constexpr, BD: tl.constexpr):
    """Store the rows with indices o_n, except negative ones."""
    o_d = tl.arange(0, BD)
    m_x = (o_n >= 0)[:, None] & (o_d < D)[None, :]
    tl.store(p + o_n[:, None].to(tl.int64) * stride + o_d[None, :], x.to(p.dtype.element_ty), mask=m_x)


@triton.jit
def _real(p_real, o_t, limit, MASKED: tl.constexpr):
    real = o_t < limit
    if MASKED:
        real = real & (tl.load(p_real + o_t, mask=real, other=0) != 0)
    return real


@triton.jit(do_not_specialize=("tiles", "shift", "chunk", "parts"))
def cut(p_offsets, p_used, p_first, p_end, p_tile, tiles, shift, chunk, parts, BT: tl.constexpr):
    """Allocate parts to the tiles that more than one chunk of queries reads.

    Stores the first and end part of each tile and the tile of each part. A program handles BT tiles. Tiles get parts
    in the order of arrival; p_used counts the parts in use.
    """
    blocks = tl.cdiv(tiles, BT)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    o_t = tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    m_t = o_t < tiles
    p_t = p_offsets + sample * (tiles + 1) + o_t
    length = (tl.load(p_t + 1, mask=m_t, other=0) - tl.load(p_t, mask=m_t, other=0)).to(tl.int64) << shift
    mine = tl.where(length > chunk, (length + chunk - 1) // chunk, 0).to(tl.int32)
    end = tl.cumsum(mine, 0) + tl.atomic_add(p_used + sample, tl.sum(mine, 0))
    tl.store(p_first + sample * tiles + o_t, end - mine, mask=m_t)
    tl.store(p_end + sample * tiles + o_t, end, mask=m_t)
    for part in range(0, tl.max(mine, 0)):
        tl.store(p_tile + sample * parts + end - mine + part, o_t, mask=part < mine)


@triton.jit
def _work(p_offsets, p_used, p_first, p_tile, tiles, shift, chunk, parts, tokens, LISTED: tl.constexpr):
    """Sample, tile, part, whether the part is the whole tile, and the range of queries of a program.

    Parts come first, because they take longest. The range of a part that is not in use ends before it begins.
    """
    number = tl.program_id(0)
    if LISTED:
        cut_ones = tl.num_programs(0) // (parts + tiles) * parts
        whole = number >= cut_ones
        number = tl.where(whole, number - cut_ones, number)
        programs = tl.where(whole, tiles, parts)
        sample, part = (number // programs).to(tl.int64), number % programs
        exists = ~whole & (part < tl.load(p_used + sample, mask=~whole, other=0))
        tile = tl.where(whole, part, tl.load(p_tile + sample * parts + part, mask=exists, other=0))
        p_offsets += sample * (tiles + 1) + tile
        length = (tl.load(p_offsets + 1) - tl.load(p_offsets)).to(tl.int64) << shift
        first = tl.load(p_first + sample * tiles + tile, mask=exists, other=0)
        at = (part - first).to(tl.int64) * tl.where(whole, 0, chunk)
        end = tl.where(whole, length, tl.minimum(length, at + chunk))
        end = tl.where(tl.where(whole, length <= chunk, exists), end, -1)
    else:
        sample, part, whole = (number // parts).to(tl.int64), number % parts, False
        each = tl.cdiv(tokens, chunk)
        tile, at = part // each, (part % each).to(tl.int64) * chunk
        end = tl.minimum(tokens.to(tl.int64), at + chunk)
    return sample, tile, part, whole, at, end


@triton.jit(do_not_specialize=NUMBERS)
def backward_keys(
    p_k, p_v, p_dk, p_dv, p_q, p_g, p_xk, p_xv, p_binary, p_delta, p_real, p_logs, p_counts, p_offsets, p_readers,
    p_own, p_dmk, p_dmv, p_used, p_first, p_tile, scale, factor, heads, tokens, limit, all_nodes, shift, below, picks,
    chunk, parts, s_real, s_log,
    s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_dkb, s_dkh, s_dk, s_dvb, s_dvh, s_dv, s_qb, s_qh, s_q, s_gb, s_gh, s_g,
    LISTED: tl.constexpr, NODES: tl.constexpr, FOLD: tl.constexpr, ENRICHED: tl.constexpr,
    REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr, BT: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys, or of a part of it, which is one chunk of its queries.

    The `limit` keys are tokens, extra keys, or with NODES the nodes of one level, each of `below` tokens. LISTED tiles
    are read by nodes of 2**shift queries each; other tiles are read by all queries and always split. Parts are written
    to p_xk and p_xv.
    """
    tiles = tl.cdiv(limit, BT)
    sample, tile, part, whole, at, end = _work(
        p_offsets, p_used, p_first, p_tile, tiles, shift, chunk, parts, tokens, LISTED
    )  # fmt: skip
    if end >= at:
        batch, head = sample // heads, sample % heads
        p_real += batch * s_real
        if LISTED:
            p_readers += sample * tiles * tl.minimum(picks, tiles) + tl.load(p_offsets + sample * (tiles + 1) + tile)
        o_t = tile * BT + tl.arange(0, BT)
        real = _real(p_real, o_t, limit, MASKED and FOLD)
        o_k = tl.where(real, o_t, -1) if MASKED else tl.minimum(o_t, limit - 1)
        k = rows_of(p_k + batch * s_kb + head * s_kh, s_k, o_k, D, BD, FAR, MASKED)  # [BT, BD]
        v = rows_of(p_v + batch * s_vb + head * s_vh, s_v, o_k, D, BD, FAR, MASKED)
        bias = tl.where(real, 0.0, NEVER)
        if NODES:
            logs = tl.load(p_logs + batch * s_log + o_k, mask=real, other=NEVER)
            bias = logs if REWEIGHT else tl.where(logs > NEVER, 0.0, NEVER)
        dk, dv = tl.zeros([BT, BD], tl.float32), tl.zeros([BT, BD], tl.float32)
        for place in tl.range(at.to(tl.int32), end.to(tl.int32), BM, num_stages=STAGES):
            o_q = _queries(p_readers, p_real, place, end, shift, tokens, LISTED, MASKED, BM)
            seen = bias[:, None]
            if EXCLUDE and NODES:
                own = sample * limit + tl.maximum(o_q, 0) // below
                seen = less_picked(seen, p_own, own[None, :], tl.minimum(picks, limit), o_t[:, None])
            dk, dv = _key_step(
                dk, dv, k, v, p_q + batch * s_qb + head * s_qh, p_g + batch * s_gb + head * s_gh,
                p_binary + sample * tokens, p_delta + sample * tokens, s_q, s_g, o_q, seen, scale, MASKED, D, BD, FAR,
            )  # fmt: skip
        dk *= factor
        if whole:
            _finish(
                p_dk + batch * s_dkb + head * s_dkh, p_dv + batch * s_dvb + head * s_dvh, s_dk, s_dv, dk, dv,
                p_dmk + sample * all_nodes * D, p_dmv + sample * all_nodes * D, p_counts + batch * s_log,
                o_t, limit, real, tile, tokens, FOLD, ENRICHED, B, D, BD,
            )  # fmt: skip
        else:
            o_x = part * BT + tl.arange(0, BT)
            _store(p_xk + sample * parts * BT * D, D, o_x, dk, D, BD)
            _store(p_xv + sample * parts * BT * D, D, o_x, dv, D, BD)


@triton.jit(do_not_specialize=NUMBERS)
def add_parts(
    p_xk, p_xv, p_dk, p_dv, p_real, p_counts, p_dmk, p_dmv, p_used, p_first, p_end, p_tile, heads, tokens, limit,
    all_nodes, chunk, parts, s_real, s_log, s_dkb, s_dkh, s_dk, s_dvb, s_dvh, s_dv,
    LISTED: tl.constexpr, FOLD: tl.constexpr, ENRICHED: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum BR rows of all parts of a tile; the program of the tile's first part does it. Parts are [parts * BT, D]."""
    tiles = tl.cdiv(limit, BT)
    first = tl.program_id(0) // (BT // BR)
    if LISTED:
        sample, first = (first // parts).to(tl.int64), first % parts
        exists = first < tl.load(p_used + sample)
        tile = tl.load(p_tile + sample * parts + first, mask=exists, other=0)
        leads = exists & (first == tl.load(p_first + sample * tiles + tile, mask=exists, other=-1))
        end = tl.load(p_end + sample * tiles + tile, mask=leads, other=0)
    else:
        sample, tile = (first // tiles).to(tl.int64), first % tiles
        each = tl.cdiv(tokens, chunk)
        first, end = tile * each, tile * each + each
    if end > first:
        batch, head = sample // heads, sample % heads
        o_r = tl.program_id(0) % (BT // BR) * BR + tl.arange(0, BR)
        dk, dv = tl.zeros([BR, BD], tl.float32), tl.zeros([BR, BD], tl.float32)
        for part in tl.range(first, end, loop_unroll_factor=8):  # loads many parts at once
            o_x = part * BT + o_r
            dk += rows_of(p_xk + sample * parts * BT * D, D, o_x, D, BD, True)
            dv += rows_of(p_xv + sample * parts * BT * D, D, o_x, D, BD, True)
        o_t = tile * BT + o_r
        _finish(
            p_dk + batch * s_dkb + head * s_dkh, p_dv + batch * s_dvb + head * s_dvh, s_dk, s_dv, dk, dv,
            p_dmk + sample * all_nodes * D, p_dmv + sample * all_nodes * D, p_counts + batch * s_log,
            o_t, limit, _real(p_real + batch * s_real, o_t, limit, MASKED and FOLD), tile, tokens,
            FOLD, ENRICHED, B, D, BD,
        )  # fmt: skip
