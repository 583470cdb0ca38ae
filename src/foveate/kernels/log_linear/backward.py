# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Backward pass of log-linear attention in Triton: gradients of the queries, and of the keys and values.

The gradient of the queries takes the steps of the forward pass. For keys and values, one program computes a tile of
keys that the same queries read: a block of tokens, the children of a node, or a tile of keys that all queries read. It
walks through the queries of the nodes that picked the tile, its readers. A tile with more than one chunk of queries is
split into parts, one program per chunk, and the parts are summed in a fixed order.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, empty_like, empty_lse, launcher, padded_size, recorded
from foveate.kernels.log_linear.forward import (
    FORWARD,
    LN2,
    MINUS_INF,
    NUMBERS,
    KernelConfig,
    Keys,
    attend_extra,
    attend_means,
    attend_tokens,
    batch_stride,
    config_for,
    locate,
    mask_of,
    mask_picked,
    needs_int64,
    over_queries,
    real_rows,
    register_limit,
    rows_of,
    store_rows,
)
from foveate.kernels.log_linear.pooling import level_sizes, level_starts

__all__ = ["Readers", "backward_keys", "backward_queries", "list_readers"]

BACKWARD_QUERIES = FORWARD | {64: KernelConfig(64, 64, 32, 4, 2, 128), 128: KernelConfig(64, 32, 16, 4, 2, None)}
# Steps are of queries. Tiles of keys that all queries read have `rows` keys. Other tiles are blocks, with `warps` for
# each 16 keys; a block of tokens has few readers, so that a large step would be half empty.
BACKWARD_TOKENS = {
    64: KernelConfig(16, 32, 16, 1, 2, 168),
    128: KernelConfig(16, 64, 16, 2, 2, None),
    256: KernelConfig(16, 16, 16, 4, 2, None),
}
BACKWARD_NODES = BACKWARD_TOKENS | {64: KernelConfig(16, 128, 16, 2, 2, 168)}
BACKWARD_SHARED = {
    64: KernelConfig(64, 128, 32, 4, 2, None),
    128: KernelConfig(64, 32, 32, 4, 2, None),
    256: KernelConfig(64, 16, 16, 8, 2, None),
}
CHUNK = 4096  # largest number of queries that one program walks through for a tile of keys
RUN, RUNS = 128, 64  # nodes whose picks one program counts, and the largest number of runs (memory grows with it)
AT_ONCE = 128  # picks counted at once
ALLOCATED = 32  # nodes that one program of `_allocate` handles
ADDED = 8  # rows of a tile that one program of `_add_parts` sums
TOKENS, EXTRA = -1, -2  # kinds of keys other than the levels of nodes
PROGRAMS = 1024  # target number of programs for shared keys: few tiles, so only short chunks keep the GPU busy
KEY_NUMBERS = ("heads", "tokens", "limit", "all_nodes", "shift", "picks", "chunk", "parts")  # not specialized at 1


# --- the gradient of the queries -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=NUMBERS)
def _backward_queries(
    p_q, p_k, p_v, p_ek, p_ev, p_out, p_g, p_dq, p_mk, p_mv, p_logs, p_real, p_list1, p_list2, p_list3, p_list4,
    p_lse, p_dlse, p_binary, p_delta, scale, factor, heads, tokens, extra, nodes, top_k, s_log, s_real,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ekb, s_ekh, s_ek, s_evb, s_evh, s_ev, s_outb, s_outh, s_out,
    s_gb, s_gh, s_g, s_dqb, s_dqh, s_dq,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, EXTRA: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr, SMALL_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries, and two numbers per query that `backward_keys` needs.

    p_binary: LSE in base 2, infinite for rows without keys. p_delta: sum(out * dout) - dlse.
    """
    batch, head, sample, row = locate(tokens, heads, M)
    p_real += batch * s_real
    o_m = real_rows(p_real, row, tokens, MASKED, M)
    o_r = tl.maximum(o_m, 0)
    p_q += batch * s_qb + head * s_qh
    q = rows_of(p_q, s_q, o_r, D, BD, INT64)  # [M, BD]
    p_g += batch * s_gb + head * s_gh
    g = rows_of(p_g, s_g, o_r, D, BD, INT64)
    out = rows_of(p_out + batch * s_outb + head * s_outh, s_out, o_r, D, BD, INT64)
    lse = tl.load(p_lse + sample * tokens + o_m, mask=o_m >= 0, other=MINUS_INF) / LN2
    lse = tl.where(lse == MINUS_INF, float("inf"), lse)  # rows without keys have weight 0
    delta = tl.sum(out.to(tl.float32) * g.to(tl.float32), 1)
    if p_dlse is not None:
        delta -= tl.load(p_dlse + sample * tokens + o_m, mask=o_m >= 0, other=0.0)
    acc = tl.zeros([M, BD], tl.float32)
    if ENRICHED > 0:
        lse, delta, acc = attend_means(
            lse, delta, acc, q, g, p_mk + sample * nodes * D, p_mv + sample * nodes * D, p_logs + batch * s_log,
            (p_list1, p_list2, p_list3, p_list4), sample, row, tokens, top_k, scale,
            LEVELS, ENRICHED, REWEIGHT, EXCLUDE, MASKED, True, EVEN, STAGES, B, M, BN, D, BD, INT64,
        )  # fmt: skip
    if EXTRA:
        lse, delta, acc = attend_extra(
            lse, delta, acc, q, g, p_ek + batch * s_ekb + head * s_ekh, p_ev + batch * s_evb + head * s_evh,
            s_ek, s_ev, extra, scale, True, STAGES, BN, D, BD, INT64,
        )  # fmt: skip
    lse, delta, acc = attend_tokens(
        lse, delta, acc, q, g, p_q, p_g, s_q, s_g, o_r,
        p_k + batch * s_kb + head * s_kh, p_v + batch * s_vb + head * s_vh, p_real, p_list1, s_k, s_v,
        sample, row, tokens, top_k, scale, MASKED, True, EVEN, SMALL_STAGES, B, M, BK, D, BD, INT64,
    )  # fmt: skip
    acc = tl.where((o_m >= 0)[:, None], acc * factor, 0.0)
    store_rows(p_dq + batch * s_dqb + head * s_dqh, s_dq, row, tokens, acc, M, D, BD)
    o_m = row + tl.arange(0, M)
    tl.store(p_binary + sample * tokens + o_m, lse, mask=o_m < tokens)
    tl.store(p_delta + sample * tokens + o_m, delta, mask=o_m < tokens)


def backward_queries(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the queries, their LSE in base 2, and sum(out * grad_out) - grad_lse of each.

    The LSE in base 2 is infinite for a query without keys, so that its weights are 0.
    """
    dq, binary, delta = empty_like(q), empty_lse(q), empty_lse(q)
    _launch_queries(q, keys, out, lse, grad_out, grad_lse, dq, binary, delta)
    return dq, binary, delta


@launcher
def _launch_queries(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, dq: Tensor,
    binary: Tensor, delta: Tensor,
) -> Launch:  # fmt: skip
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v}
    strided |= {"out": out, "g": grad_out, "dq": dq}
    vectors = {"p_lse": lse, "p_dlse": grad_lse, "p_binary": binary, "p_delta": delta}
    return over_queries(_backward_queries, BACKWARD_QUERIES, strided, keys, **vectors, factor=keys.scale)


# --- the gradients of keys and values --------------------------------------------------------------------------------


@triton.jit
def _queries(p_readers, p_real, at, end, shift, tokens, LISTED: tl.constexpr, MASKED: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """Indices of BM queries from place `at` in the concatenated runs of all readers; -1 for none."""
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
    MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    o_r = o_q if MASKED else tl.maximum(o_q, 0)
    q = rows_of(p_q, s_q, o_r, D, BD, INT64, MASKED)  # [BM, BD]
    binary = tl.load(p_binary + o_q, mask=o_q >= 0, other=float("inf"))
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale + bias  # [BT, BM]
    p = tl.math.exp2(scores - binary[None, :])
    g = rows_of(p_g, s_g, o_r, D, BD, INT64, MASKED)
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
    """Store the gradients of the keys o_t; with FOLD (tokens), add the gradients from the means."""
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


@triton.jit(do_not_specialize=("nodes", "picks", "runs", "run"))
def _place(p_list, p_cells, p_readers, nodes, picks, runs, run, K: tl.constexpr, E: tl.constexpr, WRITE: tl.constexpr):
    """Count the picks of each node in each run of rows, or with WRITE, store the rows that picked each node.

    Cells are [samples, nodes, runs]; they hold counts or, with WRITE, the next free place among the readers of the
    sample. A program handles one run, E picks at a time.
    """
    mine, sample = tl.program_id(0) % runs, (tl.program_id(0) // runs).to(tl.int64)
    o_e = tl.arange(0, E)
    end = tl.minimum(mine * run + run, nodes)
    for start in range(mine * run, end, E // K):
        row, pick = start + o_e // K, o_e % K
        m_e = (row < end) & (pick < picks)
        node = tl.load(p_list + (sample * nodes + row) * picks + pick, mask=m_e, other=-1)
        m_e = node >= 0
        p_cell = p_cells + (sample * nodes + node) * runs + mine
        if WRITE:
            earlier = (node[None, :] == node[:, None]) & (o_e[None, :] < o_e[:, None])
            place = tl.load(p_cell, mask=m_e, cache_modifier=".cg")  # L1 may be outdated
            tl.store(p_readers + sample * nodes * picks + place + tl.sum(earlier.to(tl.int32), 1), row, mask=m_e)
            tl.debug_barrier()
        tl.atomic_add(p_cell, 1, mask=m_e, sem="relaxed")
        if WRITE:
            tl.debug_barrier()


@triton.jit(do_not_specialize=("nodes", "runs", "shift", "chunk", "parts"))
def _allocate(p_cells, p_used, p_bounds, p_tile, nodes, runs, shift, chunk, parts, BN: tl.constexpr, BR: tl.constexpr):
    """Convert the counts in cells into places, and allocate parts to nodes with more than one chunk of queries.

    Nodes get places and parts in the order of arrival; p_used counts both for each sample. p_bounds [samples, nodes,
    4] holds the first and the end reader, and the first and the end part of each node; p_tile the node of each part.
    A program handles BN nodes.
    """
    groups = tl.cdiv(nodes, BN)
    sample = (tl.program_id(0) // groups).to(tl.int64)
    o_n, o_r = tl.program_id(0) % groups * BN + tl.arange(0, BN), tl.arange(0, BR)
    m_n = o_n < nodes
    p_cells += (sample * nodes + o_n)[:, None] * runs + o_r[None, :]
    m_c = m_n[:, None] & (o_r < runs)[None, :]
    cells = tl.load(p_cells, mask=m_c, other=0)  # [BN, BR]
    count = tl.sum(cells, 1)
    p_used += 2 * sample
    end = tl.atomic_add(p_used, tl.sum(count, 0)) + tl.cumsum(count, 0)
    tl.store(p_cells, (end - count)[:, None] + tl.cumsum(cells, 1) - cells, mask=m_c)
    length = count.to(tl.int64) << shift
    cuts = tl.where(length > chunk, (length + chunk - 1) // chunk, 0).to(tl.int32)
    end_part = tl.atomic_add(p_used + 1, tl.sum(cuts, 0)) + tl.cumsum(cuts, 0)
    p_bounds += (sample * nodes + o_n) * 4
    tl.store(p_bounds, end - count, mask=m_n)
    tl.store(p_bounds + 1, end, mask=m_n)
    tl.store(p_bounds + 2, end_part - cuts, mask=m_n)
    tl.store(p_bounds + 3, end_part, mask=m_n)
    for part in range(0, tl.max(cuts, 0)):
        tl.store(p_tile + sample * parts + end_part - cuts + part, o_n, mask=part < cuts)


@triton.jit
def _work(p_bounds, p_used, p_tile, tiles, shift, chunk, parts, tokens, LISTED: tl.constexpr):
    """Sample, tile, its first reader, part, whether the part is the whole tile, and the range of queries of a program.

    Parts come first, because they take longest. The range of an unused part ends before it begins.
    """
    number = tl.program_id(0)
    if LISTED:
        cut_ones = tl.num_programs(0) // (parts + tiles) * parts
        whole = number >= cut_ones
        number = tl.where(whole, number - cut_ones, number)
        programs = tl.where(whole, tiles, parts)
        sample, part = (number // programs).to(tl.int64), number % programs
        exists = ~whole & (part < tl.load(p_used + 2 * sample + 1, mask=~whole, other=0))
        tile = tl.where(whole, part, tl.load(p_tile + sample * parts + part, mask=exists, other=0))
        p_bounds += (sample * tiles + tile) * 4
        reader = tl.load(p_bounds)
        length = (tl.load(p_bounds + 1) - reader).to(tl.int64) << shift
        at = (part - tl.load(p_bounds + 2)).to(tl.int64) * tl.where(whole, 0, chunk)
        end = tl.where(whole, length, tl.minimum(length, at + chunk))
        end = tl.where(tl.where(whole, length <= chunk, exists), end, -1)
    else:
        sample, part, whole = (number // parts).to(tl.int64), number % parts, False
        each = tl.cdiv(tokens, chunk)
        tile, at, reader = part // each, (part % each).to(tl.int64) * chunk, 0
        end = tl.minimum(tokens.to(tl.int64), at + chunk)
    return sample, tile, reader, part, whole, at, end


@triton.jit(do_not_specialize=KEY_NUMBERS)
def _backward_keys(
    p_k, p_v, p_dk, p_dv, p_q, p_g, p_xk, p_xv, p_binary, p_delta, p_real, p_logs, p_counts, p_readers,
    p_bounds, p_tile, p_used, p_own, p_dmk, p_dmv, scale, factor, heads, tokens, limit, all_nodes, shift, below, picks,
    chunk, parts, s_real, s_log,
    s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_dkb, s_dkh, s_dk, s_dvb, s_dvh, s_dv, s_qb, s_qh, s_q, s_gb, s_gh, s_g,
    LISTED: tl.constexpr, NODES: tl.constexpr, FOLD: tl.constexpr, ENRICHED: tl.constexpr,
    REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr, BT: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys, or of a part of the tile: one chunk of its queries.

    The `limit` keys are tokens, extra keys, or with NODES the nodes of one level, each of `below` tokens. LISTED tiles
    are read by nodes of 2**shift queries each; other tiles are read by all queries and always split. Parts are written
    to p_xk and p_xv.
    """
    tiles = tl.cdiv(limit, BT)
    sample, tile, reader, part, whole, at, end = _work(
        p_bounds, p_used, p_tile, tiles, shift, chunk, parts, tokens, LISTED
    )  # fmt: skip
    if end >= at:
        batch, head = sample // heads, sample % heads
        p_real += batch * s_real
        if LISTED:
            p_readers += sample * tiles * tl.minimum(picks, tiles) + reader
        o_t = tile * BT + tl.arange(0, BT)
        real = _real(p_real, o_t, limit, MASKED and FOLD)
        o_k = tl.where(real, o_t, -1) if MASKED else tl.minimum(o_t, limit - 1)
        k = rows_of(p_k + batch * s_kb + head * s_kh, s_k, o_k, D, BD, INT64, MASKED)  # [BT, BD]
        v = rows_of(p_v + batch * s_vb + head * s_vh, s_v, o_k, D, BD, INT64, MASKED)
        bias = tl.where(real, 0.0, MINUS_INF)
        if NODES:
            logs = tl.load(p_logs + batch * s_log + o_k, mask=real, other=MINUS_INF)
            bias = logs if REWEIGHT else tl.where(logs > MINUS_INF, 0.0, MINUS_INF)
        dk, dv = tl.zeros([BT, BD], tl.float32), tl.zeros([BT, BD], tl.float32)
        for place in tl.range(at.to(tl.int32), end.to(tl.int32), BM, num_stages=STAGES):
            o_q = _queries(p_readers, p_real, place, end, shift, tokens, LISTED, MASKED, BM)
            masked_bias = bias[:, None]
            if EXCLUDE and NODES:
                own = sample * limit + tl.maximum(o_q, 0) // below
                masked_bias = mask_picked(masked_bias, p_own, own[None, :], tl.minimum(picks, limit), o_t[:, None])
            dk, dv = _key_step(
                dk, dv, k, v, p_q + batch * s_qb + head * s_qh, p_g + batch * s_gb + head * s_gh,
                p_binary + sample * tokens, p_delta + sample * tokens, s_q, s_g, o_q, masked_bias, scale,
                MASKED, D, BD, INT64,
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


@triton.jit(do_not_specialize=KEY_NUMBERS)
def _add_parts(
    p_xk, p_xv, p_dk, p_dv, p_real, p_counts, p_dmk, p_dmv, p_bounds, p_tile, p_used, heads, tokens, limit,
    all_nodes, chunk, parts, s_real, s_log, s_dkb, s_dkh, s_dk, s_dvb, s_dvh, s_dv,
    LISTED: tl.constexpr, FOLD: tl.constexpr, ENRICHED: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum BR rows of all parts of a tile, in the program of its first part. Parts are [parts * BT, D]."""
    tiles = tl.cdiv(limit, BT)
    first = tl.program_id(0) // (BT // BR)
    if LISTED:
        sample, first = (first // parts).to(tl.int64), first % parts
        exists = first < tl.load(p_used + 2 * sample + 1)
        tile = tl.load(p_tile + sample * parts + first, mask=exists, other=0)
        p_bounds += (sample * tiles + tile) * 4
        leads = exists & (first == tl.load(p_bounds + 2, mask=exists, other=-1))
        end = tl.load(p_bounds + 3, mask=leads, other=0)
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


class Readers(NamedTuple):
    """Readers of each node of a level, the nodes that picked it, and the parts that divide the work on the nodes.

    Attributes:
        readers: Int32 [samples, picks of all nodes]: the readers of a node are consecutive and ascending.
        bounds: Int32 [samples, nodes, 4]: first and end reader, and first and end part of each node.
        tile: Int32 [samples, parts]: the node of each part.
        used: Int32 [samples, 2]: numbers of readers and parts.
    """

    readers: Tensor
    bounds: Tensor
    tile: Tensor
    used: Tensor


@recorded
def list_readers(keys: Keys) -> list[Tensor]:
    """Tensors of `Readers` for each level that gradients need, the finest first, by a counting sort."""
    found: list[Tensor] = []
    for level, lists in enumerate(keys.lists[: keys.enriched + 1]):
        nodes, picks = lists.shape[2:]
        tiles = _Tiles.of(keys, level - 1, nodes * picks)
        sizes = (tiles.samples, nodes * picks), (tiles.samples, nodes, 4), (tiles.samples, tiles.parts)
        readers = Readers(*(lists.new_empty(size) for size in sizes), lists.new_zeros(tiles.samples, 2))
        cells = lists.new_zeros(tiles.samples, nodes, min(RUNS, triton.cdiv(nodes, RUN)))
        _launch_place(lists, cells, readers.readers, False)
        _launch_allocate(cells, readers, tiles)
        _launch_place(lists, cells, readers.readers, True)
        found += readers
    return found


@launcher
def _launch_place(lists: Tensor, cells: Tensor, readers: Tensor, write: bool) -> Launch:
    (nodes, picks), (samples, _, runs) = lists.shape[2:], cells.shape
    most = triton.next_power_of_2(picks)
    args = lists, cells, readers, nodes, picks, runs, triton.cdiv(nodes, runs)
    return Launch(_place, (samples * runs,), args, {"K": most, "E": max(most, AT_ONCE), "WRITE": write})


@launcher
def _launch_allocate(cells: Tensor, readers: Readers, tiles: "_Tiles") -> Launch:
    samples, nodes, runs = cells.shape
    args = cells, readers.used, readers.bounds, readers.tile, nodes, runs, tiles.shift, tiles.chunk, tiles.parts
    constants = {"BN": ALLOCATED, "BR": triton.next_power_of_2(runs)}
    return Launch(_allocate, (samples * triton.cdiv(nodes, ALLOCATED),), args, constants)


def backward_keys(
    q: Tensor, keys: Keys, binary: Tensor, delta: Tensor, grad_out: Tensor, listed: list[Tensor]
) -> list[Tensor]:
    """Gradients of keys, values, extra keys and extra values.

    Args:
        q: Queries.
        keys: Everything that the queries may read.
        binary: LSE in base 2, from `backward_queries`.
        delta: sum(out * grad_out) - grad_lse, from `backward_queries`.
        grad_out: Gradient of the output.
        listed: Result of `list_readers`.
    """
    queries, levels = (q, grad_out, binary, delta), len(keys.lists)
    readers = [Readers(*listed[at : at + 4]) for at in range(0, len(listed), 4)]
    d_means = keys.means.new_empty((2, *keys.means.shape[1:]), dtype=torch.float32)
    d_tokens, d_extra = ([empty_like(x) for x in xs] for xs in ((keys.k, keys.v), (keys.extra_k, keys.extra_v)))
    for level in range(keys.enriched):
        _add_gradients(keys, queries, readers[level + 1] if level < levels - 1 else None, d_means, None, level)
    if keys.extra_k.shape[2]:
        _add_gradients(keys, queries, None, d_means, d_extra, EXTRA)
    _add_gradients(keys, queries, readers[0], d_means, d_tokens, TOKENS)
    return [*d_tokens, *d_extra]


def _add_gradients(
    keys: Keys, queries: tuple[Tensor, ...], readers: Readers | None, d_means: Tensor, grads: list[Tensor] | None,
    kind: int,
) -> None:  # fmt: skip
    """Compute the gradients of one kind of keys: of whole tiles and of parts, and then the sums of the parts.

    Args:
        keys: Everything that the queries may read.
        queries: Queries, gradient of the output, LSE in base 2, and delta.
        readers: Nodes that picked each tile; None if all queries read all tiles.
        d_means: Gradients of the means of keys and values of all levels, which are added to the token gradients.
        grads: Gradients of these keys and values; None for nodes, whose gradients are in `d_means`.
        kind: `TOKENS`, `EXTRA`, or the level of the nodes, 0 for the finest.
    """
    tiles = _Tiles.of(keys, kind, None if readers is None else readers.readers.shape[1])
    sums = d_means.new_empty((2, *keys.k.shape[:2], tiles.parts * tiles.rows, keys.k.shape[3]))
    _launch_keys(keys, queries, readers, d_means, grads, sums, tiles, kind)
    if tiles.parts:
        _launch_add_parts(keys, readers, d_means, grads, sums, tiles, kind)


class _Tiles(NamedTuple):
    """Tiles of one kind of keys, and their division into parts.

    Attributes:
        limit: Number of keys of a head.
        rows: Keys of a tile.
        samples: Batch size times number of heads.
        tiles: Number of tiles of a head.
        shift: Readers are nodes of 2**shift queries.
        chunk: Largest number of queries that one program walks through.
        parts: Largest number of parts of a head.
        config: Tile sizes and launch options.
    """

    limit: int
    rows: int
    samples: int
    tiles: int
    shift: int
    chunk: int
    parts: int
    config: KernelConfig

    @classmethod
    def of(cls, keys: Keys, kind: int, picks: int | None) -> "_Tiles":
        """Tiles of one kind; `picks` is the number of picks of a head, None if all queries read all tiles."""
        batch, heads, tokens, dim = keys.k.shape
        limits = {TOKENS: tokens, EXTRA: keys.extra_k.shape[2]}
        limit = limits[kind] if kind < 0 else level_sizes(tokens, keys.block, kind + 1)[kind]
        configs = BACKWARD_SHARED if picks is None else BACKWARD_TOKENS if kind == TOKENS else BACKWARD_NODES
        config = config_for(configs, dim)
        rows = config.rows if picks is None else keys.block
        samples, tiles = batch * heads, triton.cdiv(limit, rows)
        shift = (keys.block ** (max(kind, -1) + 2)).bit_length() - 1  # a reader is one level up
        if picks is None:
            chunk = max(CHUNK // 4, triton.cdiv(samples * tiles * tokens, PROGRAMS))
            parts = tiles * triton.cdiv(tokens, chunk)
        else:
            chunk = CHUNK
            parts = (2 * picks << shift) // CHUNK  # rounding up less than doubles the chunks
        return cls(limit, rows, samples, tiles, shift, chunk, parts, config)


@launcher
def _launch_keys(
    keys: Keys, queries: tuple[Tensor, ...], readers: Readers | None, d_means: Tensor, grads: list[Tensor] | None,
    sums: Tensor, tiles: _Tiles, kind: int,
) -> Launch:  # fmt: skip
    q, g, binary, delta = queries
    strided = *_of_kind(keys, kind), *_written(keys, d_means, grads, kind), q, g
    args = (
        *strided, *sums, binary, delta, mask_of(keys), keys.logs[:, _first_node(keys, kind) :], keys.counts,
        *(readers or 4 * [keys.counts]), keys.lists[max(kind, 0)], *d_means,
        keys.scale / math.log(2), keys.scale, keys.k.shape[1], q.shape[2], tiles.limit, keys.logs.shape[1],
        tiles.shift, keys.block ** (max(kind, -1) + 1), keys.top_k, tiles.chunk, tiles.parts,
        batch_stride(keys.real), batch_stride(keys.logs), *(stride for x in strided for stride in x.stride()[:3]),
    )  # fmt: skip
    warps = tiles.config.warps if readers is None else min(tiles.config.warps * tiles.rows // 16, 4)
    constants = {
        "NODES": kind >= 0, "REWEIGHT": keys.reweight, "EXCLUDE": keys.exclude, "BM": tiles.config.step,
        "INT64": needs_int64(strided), "STAGES": tiles.config.stages, "num_warps": warps,
        **register_limit(tiles.config),
    }  # fmt: skip
    grid = tiles.samples * (tiles.parts + (0 if readers is None else tiles.tiles))
    return Launch(_backward_keys, (grid,), args, constants | _constants(keys, readers, tiles, kind))


@launcher
def _launch_add_parts(
    keys: Keys, readers: Readers | None, d_means: Tensor, grads: list[Tensor] | None, sums: Tensor, tiles: _Tiles,
    kind: int,
) -> Launch:  # fmt: skip
    written = _written(keys, d_means, grads, kind)
    args = (
        *sums, *written, mask_of(keys), keys.counts, *d_means, *(readers or 4 * [keys.counts])[1:], keys.k.shape[1],
        keys.k.shape[2], tiles.limit, keys.logs.shape[1], tiles.chunk, tiles.parts, batch_stride(keys.real),
        batch_stride(keys.counts), *(stride for x in written for stride in x.stride()[:3]),
    )  # fmt: skip
    grid = tiles.samples * (tiles.tiles if readers is None else tiles.parts) * (tiles.rows // ADDED)
    return Launch(_add_parts, (grid,), args, {"BR": ADDED} | _constants(keys, readers, tiles, kind))


def _first_node(keys: Keys, level: int) -> int:
    return level_starts(keys.k.shape[2], keys.block, level)[-1] if level > 0 else 0


def _of_kind(keys: Keys, kind: int) -> list[Tensor]:
    """Keys and values of one kind."""
    if kind >= 0:
        return [x[:, :, _first_node(keys, kind) : _first_node(keys, kind + 1)] for x in keys.means[-2:]]
    return [keys.k, keys.v] if kind == TOKENS else [keys.extra_k, keys.extra_v]


def _written(keys: Keys, d_means: Tensor, grads: list[Tensor] | None, kind: int) -> list[Tensor]:
    """Gradients of the keys and values of one kind."""
    return grads or [x[:, :, _first_node(keys, kind) : _first_node(keys, kind + 1)] for x in d_means]


def _constants(keys: Keys, readers: Readers | None, tiles: _Tiles, kind: int) -> dict[str, Any]:
    dim = keys.k.shape[3]
    return {
        "LISTED": readers is not None, "FOLD": kind == TOKENS, "ENRICHED": keys.enriched,
        "MASKED": keys.real is not None, "B": keys.block, "BT": tiles.rows, "D": dim, "BD": padded_size(dim),
    }  # fmt: skip
