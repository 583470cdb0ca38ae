# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Log-linear attention in Triton: forward, and the gradient of the queries.

One program computes a few blocks of queries that have the same parent. It reads the keys they share in wide tiles: the
means that their ancestors' lists make visible, all means of the top level, and the extra keys. The tokens that each
block picked are read in small tiles, as one batched product over the blocks. One online softmax runs over all of them.
Scores are in base 2: ``scale`` includes log2(e), and counts are added as binary logarithms; the stored LSE is natural.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234e38)  # finite, so that differences of maxima are never NaN
NEVER = tl.constexpr(float("-inf"))
NUMBERS = ("heads", "tokens", "extra", "nodes", "top_k")  # not specialized when they equal 1


@triton.jit
def rows_of(p, stride, o_n, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr, MASK: tl.constexpr = False):
    """The rows with indices o_n as [*o_n.shape, BD]; zeros from column D. With MASK, negative indices give zeros."""
    o_n, o_d = tl.expand_dims(o_n, len(o_n.shape)), tl.arange(0, BD)
    m_x = (o_d < D) & (o_n >= 0 if MASK else True)
    if MASK:
        o_n = tl.maximum(o_n, 0)
    p_n = p + (o_n.to(tl.int64 if FAR else tl.int32) * stride + o_d)
    # cached in L1, because siblings read the same rows
    if MASK or D < BD:
        x = tl.load(p_n, mask=m_x, other=0.0, cache_modifier=".ca")
    else:
        x = tl.load(p_n, cache_modifier=".ca")
    return x


@triton.jit
def transposed(x):
    """Swap the last two dimensions."""
    return tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else tl.trans(x)


@triton.jit
def children(pick, B: tl.constexpr):
    """Indices [.., picks * B] of the children of nodes [.., picks]."""
    o_n = tl.expand_dims(pick, len(pick.shape)) * B + tl.arange(0, B)
    if len(pick.shape) == 2:
        o_n = tl.reshape(o_n, [pick.shape[0], pick.shape[1] * B])
    else:
        o_n = tl.reshape(o_n, [pick.shape[0] * B])
    return o_n


@triton.jit
def node_bias(p_logs, o_n, nodes, span, tokens, REWEIGHT: tl.constexpr, MASKED: tl.constexpr):
    """Bias of the scores of nodes of `span` tokens: log2 of their number of tokens, or 0 without REWEIGHT."""
    if MASKED:
        bias = tl.load(p_logs + o_n, mask=o_n < nodes, other=NEVER)
        if not REWEIGHT:
            bias = tl.where(bias > NEVER, 0.0, NEVER)
    else:
        full, last = 0.0, 0.0
        if REWEIGHT:
            full = tl.math.log2(span.to(tl.float32))
            last = tl.math.log2((tokens - (nodes - 1) * span).to(tl.float32))
        bias = tl.where(o_n < nodes - 1, full, tl.where(o_n < nodes, last, NEVER))
    return bias


@triton.jit
def less_picked(bias, p_list, o_l, picks, o_n):
    """The bias with -inf where list o_l contains node o_n.

    One of o_l and o_n runs along the first dimension, the other along the second: [M, 1] and [1, N], or [1, M] and
    [N, 1].
    """
    bias += tl.zeros_like(o_l).to(tl.float32)
    for j in range(0, picks):
        bias = tl.where(tl.load(p_list + o_l * picks + j) == o_n, NEVER, bias)
    return bias


@triton.jit
def _step(
    m, norm, acc, q, g, p_k, p_v, s_k, s_v, o_n, bias, scale,
    GRADIENT: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr,
    MASK: tl.constexpr = False,
):  # fmt: skip
    """One more step over the keys o_n: of online softmax, or with GRADIENT of dq, where m is the LSE and norm delta.

    The bias of EVEN steps is a scalar, which is fused with the maximum into one multiply-add.
    """
    LAST: tl.constexpr = len(q.shape) - 1  # pyright: ignore[reportAssignmentType]
    k = rows_of(p_k, s_k, o_n, D, BD, FAR, MASK)
    scores = tl.dot(q, transposed(k), input_precision="ieee")  # [.., M, BN]
    if not EVEN:
        scores = scores * scale + bias
    if not GRADIENT:
        m_new = tl.max(scores, LAST)
        m_new = tl.maximum(m, m_new * scale + bias if EVEN else m_new)
        shrink = tl.math.exp2(m - m_new)
        norm, acc, m = norm * shrink, acc * tl.expand_dims(shrink, LAST), m_new
    p = tl.math.exp2(scores * scale + tl.expand_dims(bias - m, LAST) if EVEN else scores - tl.expand_dims(m, LAST))
    v = rows_of(p_v, s_v, o_n, D, BD, FAR, MASK)  # loaded late to save registers
    if GRADIENT:
        ds = p * (tl.dot(g, transposed(v), input_precision="ieee") - tl.expand_dims(norm, LAST))
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    else:
        norm += tl.sum(p, LAST)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m, norm, acc


@triton.jit
def _see_means(
    m, norm, acc, q, g, p_mk, p_mv, p_logs, lists, sample, row, tokens, top_k, scale,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr,
    MASKED: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Attend to the means that are visible to all rows."""
    nodes, ancestor, span = tl.cdiv(tokens, B), row // B, tokens * 0 + B  # not a constant: it changes in the loop
    o_m = tl.minimum(row + tl.arange(0, M), tokens - 1) // B  # ancestor of each row
    for level in tl.static_range(ENRICHED):
        above, parent = tl.cdiv(nodes, B), ancestor // B
        picks = tl.minimum(top_k, above)
        end = nodes
        if level < LEVELS - 1:
            end = picks * B
            p_above = lists[level + 1] + (sample * above + parent) * picks
        for start in tl.range(0, end, BN, num_stages=STAGES):
            if level == LEVELS - 1:
                o_n = start + tl.arange(0, BN)
            else:
                o_j = start // B + tl.arange(0, BN // B)
                pick = tl.load(p_above + o_j) if EVEN else tl.load(p_above + o_j, mask=o_j < picks, other=-1)
                o_n = children(pick if EVEN else tl.where(pick >= 0, pick, above), B)  # no pick: past the end
            if EVEN:
                bias = tl.math.log2(span.to(tl.float32)) if REWEIGHT else 0.0
            else:
                bias = node_bias(p_logs, o_n, nodes, span, tokens, REWEIGHT, MASKED)[None, :]
                if EXCLUDE:
                    own = (sample * nodes + o_m)[:, None]
                    bias = less_picked(bias, lists[level], own, tl.minimum(top_k, nodes), o_n[None, :])
                o_n = tl.minimum(o_n, nodes - 1)
            m, norm, acc = _step(m, norm, acc, q, g, p_mk, p_mv, D, D, o_n, bias, scale, GRADIENT, EVEN, D, BD, FAR)
        p_mk += nodes.to(tl.int64) * D
        p_mv += nodes.to(tl.int64) * D
        p_logs += nodes
        nodes, ancestor, span, o_m = above, parent, span * B, o_m // B
    return m, norm, acc


@triton.jit
def _see_extra(
    m, norm, acc, q, g, p_ek, p_ev, s_ek, s_ev, extra, scale,
    GRADIENT: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Attend to the extra keys, which all rows see."""
    for start in tl.range(0, extra, BN, num_stages=STAGES):
        o_n = start + tl.arange(0, BN)
        bias = tl.where(o_n < extra, 0.0, NEVER)[None, :]
        o_n = tl.minimum(o_n, extra - 1)
        m, norm, acc = _step(m, norm, acc, q, g, p_ek, p_ev, s_ek, s_ev, o_n, bias, scale, GRADIENT, False, D, BD, FAR)
    return m, norm, acc


@triton.jit
def _see_tokens(
    m, norm, acc, q, g, p_q, p_g, s_q, s_g, o_r, p_k, p_v, p_real, p_list, s_k, s_v, sample, row, tokens, top_k, scale,
    MASKED: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens of the blocks that each block of rows picked, BK blocks at a time."""
    G: tl.constexpr = M // B
    BN: tl.constexpr = BK * B
    blocks = tl.cdiv(tokens, B)
    picks = tl.minimum(top_k, blocks)
    o_g = row // B + tl.arange(0, G)
    p_list += (sample * blocks + o_g[:, None]) * picks
    if G > 1:
        m, norm, acc = tl.reshape(m, [G, B]), tl.reshape(norm, [G, B]), tl.reshape(acc, [G, B, BD])
        o_r = tl.reshape(o_r, [G, B])  # loaded again: the rows of a reshaped tile would share one memory bank
        q = rows_of(p_q, s_q, o_r, D, BD, FAR)
        if GRADIENT:
            g = rows_of(p_g, s_g, o_r, D, BD, FAR)
    for start in tl.range(0, picks, BK, num_stages=STAGES):
        o_j = start + tl.arange(0, BK)
        if EVEN:
            pick = tl.load(p_list + o_j[None, :])
        else:
            pick = tl.load(p_list + o_j[None, :], mask=(o_g < blocks)[:, None] & (o_j < picks)[None, :], other=-1)
            pick = tl.where(pick >= 0, pick, blocks)  # no pick: past the end
        o_n = children(pick, B)  # [G, BN]
        if G == 1:
            o_n = tl.reshape(o_n, [BN])
        bias = 0.0
        if not EVEN:
            real = o_n < tokens
            if MASKED:
                real = tl.load(p_real + o_n, mask=real, other=0) != 0
            bias = tl.expand_dims(tl.where(real, 0.0, NEVER), len(o_n.shape) - 1)
            o_n = tl.where(real, o_n, -1) if MASKED else tl.minimum(o_n, tokens - 1)
        m, norm, acc = _step(
            m, norm, acc, q, g, p_k, p_v, s_k, s_v, o_n, bias, scale, GRADIENT, EVEN, D, BD, FAR, MASKED
        )
    if G > 1:
        m, norm, acc = tl.reshape(m, [M]), tl.reshape(norm, [M]), tl.reshape(acc, [M, BD])
    return m, norm, acc


@triton.jit
def _place(tokens, heads, M: tl.constexpr):
    """Batch, head, sample (batch * heads + head) and first row; head by head, so that few heads share the cache."""
    groups = tl.cdiv(tokens, M)
    sample = (tl.program_id(0) // groups).to(tl.int64)
    return sample // heads, sample % heads, sample, tl.program_id(0) % groups * M


@triton.jit
def _real_rows(p_real, row, tokens, MASKED: tl.constexpr, M: tl.constexpr):
    """Indices of the rows [M]; -1 for rows that do not exist or are padding."""
    o_m = row + tl.arange(0, M)
    m_m = o_m < tokens
    if MASKED:
        m_m = m_m & (tl.load(p_real + o_m, mask=m_m, other=0) != 0)
    return tl.where(m_m, o_m, -1)


@triton.jit
def _store(p, stride, row, tokens, x, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    o_m, o_d = row + tl.arange(0, M), tl.arange(0, BD)
    m_x = (o_m < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(p + o_m[:, None].to(tl.int64) * stride + o_d[None, :], x.to(p.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    p_q, p_k, p_v, p_ek, p_ev, p_out, p_mk, p_mv, p_logs, p_real, p_list1, p_list2, p_list3, p_list4, p_lse,
    scale, heads, tokens, extra, nodes, top_k, s_log, s_real,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ekb, s_ekh, s_ek, s_evb, s_evh, s_ev, s_ob, s_oh, s_o,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, EXTRA: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr, STAGES: tl.constexpr, SMALL_STAGES: tl.constexpr,
):  # fmt: skip
    """Output and LSE; zeros and -inf for padding and for rows that see nothing.

    EVEN: all nodes, lists and steps are full, so that nothing needs a mask. EXTRA: there are extra keys.
    """
    batch, head, sample, row = _place(tokens, heads, M)
    p_real += batch * s_real
    o_m = _real_rows(p_real, row, tokens, MASKED, M)
    o_r = tl.maximum(o_m, 0)
    p_q += batch * s_qb + head * s_qh
    q = rows_of(p_q, s_q, o_r, D, BD, FAR)  # [M, BD]
    m = tl.full([M], LOWEST, tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BD], tl.float32)
    if ENRICHED > 0:
        m, norm, acc = _see_means(
            m, norm, acc, q, q, p_mk + sample * nodes * D, p_mv + sample * nodes * D, p_logs + batch * s_log,
            (p_list1, p_list2, p_list3, p_list4), sample, row, tokens, top_k, scale,
            LEVELS, ENRICHED, REWEIGHT, EXCLUDE, MASKED, False, EVEN, STAGES, B, M, BN, D, BD, FAR,
        )  # fmt: skip
    if EXTRA:
        m, norm, acc = _see_extra(
            m, norm, acc, q, q, p_ek + batch * s_ekb + head * s_ekh, p_ev + batch * s_evb + head * s_evh, s_ek, s_ev,
            extra, scale, False, STAGES, BN, D, BD, FAR,
        )  # fmt: skip
    m, norm, acc = _see_tokens(
        m, norm, acc, q, q, p_q, p_q, s_q, s_q, o_r,
        p_k + batch * s_kb + head * s_kh, p_v + batch * s_vb + head * s_vh, p_real, p_list1, s_k, s_v,
        sample, row, tokens, top_k, scale, MASKED, False, EVEN, SMALL_STAGES, B, M, BK, D, BD, FAR,
    )  # fmt: skip
    norm = tl.where(o_m >= 0, norm, 0.0)
    acc = tl.where((norm != 0)[:, None], acc / norm[:, None], 0.0)  # NaN must propagate
    _store(p_out + batch * s_ob + head * s_oh, s_o, row, tokens, acc, M, D, BD)
    o_m = row + tl.arange(0, M)
    lse = tl.where(norm != 0, (m + tl.math.log2(norm)) * LN2, NEVER)
    tl.store(p_lse + sample * tokens + o_m, lse, mask=o_m < tokens)


@triton.jit(do_not_specialize=NUMBERS)
def backward_queries(
    p_q, p_k, p_v, p_ek, p_ev, p_out, p_g, p_dq, p_mk, p_mv, p_logs, p_real, p_list1, p_list2, p_list3, p_list4,
    p_lse, p_dlse, p_binary, p_delta, scale, factor, heads, tokens, extra, nodes, top_k, s_log, s_real,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ekb, s_ekh, s_ek, s_evb, s_evh, s_ev, s_ob, s_oh, s_o,
    s_gb, s_gh, s_g, s_db, s_dh, s_d,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, EXTRA: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, FAR: tl.constexpr, STAGES: tl.constexpr, SMALL_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries, and two numbers per query that `backward_keys` needs.

    p_binary: LSE in base 2, infinite for rows that see nothing. p_delta: sum(out * dout) - dlse.
    """
    batch, head, sample, row = _place(tokens, heads, M)
    p_real += batch * s_real
    o_m = _real_rows(p_real, row, tokens, MASKED, M)
    o_r = tl.maximum(o_m, 0)
    p_q += batch * s_qb + head * s_qh
    q = rows_of(p_q, s_q, o_r, D, BD, FAR)  # [M, BD]
    p_g += batch * s_gb + head * s_gh
    g = rows_of(p_g, s_g, o_r, D, BD, FAR)
    out = rows_of(p_out + batch * s_ob + head * s_oh, s_o, o_r, D, BD, FAR)
    lse = tl.load(p_lse + sample * tokens + o_m, mask=o_m >= 0, other=NEVER) / LN2
    lse = tl.where(lse == NEVER, float("inf"), lse)  # rows that see nothing have weight 0
    delta = tl.sum(out.to(tl.float32) * g.to(tl.float32), 1)
    delta -= tl.load(p_dlse + sample * tokens + o_m, mask=o_m >= 0, other=0.0)
    acc = tl.zeros([M, BD], tl.float32)
    if ENRICHED > 0:
        lse, delta, acc = _see_means(
            lse, delta, acc, q, g, p_mk + sample * nodes * D, p_mv + sample * nodes * D, p_logs + batch * s_log,
            (p_list1, p_list2, p_list3, p_list4), sample, row, tokens, top_k, scale,
            LEVELS, ENRICHED, REWEIGHT, EXCLUDE, MASKED, True, EVEN, STAGES, B, M, BN, D, BD, FAR,
        )  # fmt: skip
    if EXTRA:
        lse, delta, acc = _see_extra(
            lse, delta, acc, q, g, p_ek + batch * s_ekb + head * s_ekh, p_ev + batch * s_evb + head * s_evh,
            s_ek, s_ev, extra, scale, True, STAGES, BN, D, BD, FAR,
        )  # fmt: skip
    lse, delta, acc = _see_tokens(
        lse, delta, acc, q, g, p_q, p_g, s_q, s_g, o_r,
        p_k + batch * s_kb + head * s_kh, p_v + batch * s_vb + head * s_vh, p_real, p_list1, s_k, s_v,
        sample, row, tokens, top_k, scale, MASKED, True, EVEN, SMALL_STAGES, B, M, BK, D, BD, FAR,
    )  # fmt: skip
    acc = tl.where((o_m >= 0)[:, None], acc * factor, 0.0)
    _store(p_dq + batch * s_db + head * s_dh, s_d, row, tokens, acc, M, D, BD)
    o_m = row + tl.arange(0, M)
    tl.store(p_binary + sample * tokens + o_m, lse, mask=o_m < tokens)
    tl.store(p_delta + sample * tokens + o_m, delta, mask=o_m < tokens)
