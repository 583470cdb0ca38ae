# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Forward pass of log-linear attention in Triton, and the steps that it shares with the gradient of the queries.

One program computes a few blocks of queries with the same parent. It reads their shared keys in wide tiles: the means
that their ancestors' lists make visible, all means of the top level, and the extra keys. The tokens that each block
picked are read in small tiles, as one batched product over the blocks. One online softmax runs over all of them.
Scores are in base 2: ``scale`` includes log2(e), and counts are added as binary logarithms; the stored LSE is natural.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, empty_lse, launcher, padded_size

__all__ = ["KernelConfig", "Keys", "forward", "over_queries"]

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234e38)  # finite, so that differences of maxima are never NaN
MINUS_INF = tl.constexpr(float("-inf"))
NUMBERS = ("heads", "tokens", "extra", "nodes", "top_k")  # not specialized when they equal 1


@triton.jit
def rows_of(p, stride, o_n, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr, MASK: tl.constexpr = False):
    """Rows with indices o_n as [*o_n.shape, BD], padded with zero columns from D to BD.

    INT64: offsets may exceed 32 bits. MASK: negative indices give rows of zeros.
    """
    o_n, o_d = tl.expand_dims(o_n, len(o_n.shape)), tl.arange(0, BD)
    m_x = (o_d < D) & (o_n >= 0 if MASK else True)
    if MASK:
        o_n = tl.maximum(o_n, 0)
    p_n = p + (o_n.to(tl.int64 if INT64 else tl.int32) * stride + o_d)
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
        bias = tl.load(p_logs + o_n, mask=o_n < nodes, other=MINUS_INF)
        if not REWEIGHT:
            bias = tl.where(bias > MINUS_INF, 0.0, MINUS_INF)
    else:
        full, last = 0.0, 0.0
        if REWEIGHT:
            full = tl.math.log2(span.to(tl.float32))
            last = tl.math.log2((tokens - (nodes - 1) * span).to(tl.float32))
        bias = tl.where(o_n < nodes - 1, full, tl.where(o_n < nodes, last, MINUS_INF))
    return bias


@triton.jit
def mask_picked(bias, p_list, o_l, picks, o_n):
    """Bias with -inf where list o_l contains node o_n.

    One of o_l and o_n runs along the first dimension, the other along the second: [M, 1] and [1, N], or [1, M] and
    [N, 1].
    """
    bias += tl.zeros_like(o_l).to(tl.float32)
    for j in range(0, picks):
        bias = tl.where(tl.load(p_list + o_l * picks + j) == o_n, MINUS_INF, bias)
    return bias


@triton.jit
def _step(
    m, norm, acc, q, g, p_k, p_v, s_k, s_v, o_n, bias, scale,
    GRADIENT: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr,
    MASK: tl.constexpr = False,
):  # fmt: skip
    """One step over the keys o_n: of online softmax, or with GRADIENT of dq, where m is the LSE and norm is delta.

    The bias of EVEN steps is a scalar, fused with the maximum into one multiply-add.
    """
    LAST: tl.constexpr = len(q.shape) - 1  # pyright: ignore[reportAssignmentType]
    k = rows_of(p_k, s_k, o_n, D, BD, INT64, MASK)
    scores = tl.dot(q, transposed(k), input_precision="ieee")  # [.., M, BN]
    if not EVEN:
        scores = scores * scale + bias
    if not GRADIENT:
        m_new = tl.max(scores, LAST)
        m_new = tl.maximum(m, m_new * scale + bias if EVEN else m_new)
        shrink = tl.math.exp2(m - m_new)
        norm, acc, m = norm * shrink, acc * tl.expand_dims(shrink, LAST), m_new
    p = tl.math.exp2(scores * scale + tl.expand_dims(bias - m, LAST) if EVEN else scores - tl.expand_dims(m, LAST))
    v = rows_of(p_v, s_v, o_n, D, BD, INT64, MASK)  # loaded late to save registers
    if GRADIENT:
        ds = p * (tl.dot(g, transposed(v), input_precision="ieee") - tl.expand_dims(norm, LAST))
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    else:
        norm += tl.sum(p, LAST)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m, norm, acc


@triton.jit
def attend_means(
    m, norm, acc, q, g, p_mk, p_mv, p_logs, lists, sample, row, tokens, top_k, scale,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr,
    MASKED: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Attend to the means visible to all rows."""
    FULL: tl.constexpr = EVEN and not EXCLUDE  # pyright: ignore[reportAssignmentType]
    nodes, ancestor, span = tl.cdiv(tokens, B), row // B, tokens * 0 + B  # not a constant: it changes in the loop
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
            if FULL:
                bias = tl.math.log2(span.to(tl.float32)) if REWEIGHT else 0.0
            else:
                bias = node_bias(p_logs, o_n, nodes, span, tokens, REWEIGHT, MASKED)[None, :]
                if EXCLUDE:  # what the rows of a block picked; above blocks all rows have the same ancestor
                    G: tl.constexpr = M // B if level == 0 else 1  # pyright: ignore[reportAssignmentType]
                    own = sample * nodes + tl.minimum(ancestor + tl.arange(0, G), nodes - 1)
                    bias = mask_picked(bias, lists[level], own[:, None], tl.minimum(top_k, nodes), o_n[None, :])
                    if G > 1:
                        bias = tl.reshape(tl.broadcast_to(bias[:, None, :], [G, B, BN]), [M, BN])
                o_n = tl.minimum(o_n, nodes - 1)
            m, norm, acc = _step(m, norm, acc, q, g, p_mk, p_mv, D, D, o_n, bias, scale, GRADIENT, FULL, D, BD, INT64)
        p_mk += nodes.to(tl.int64) * D
        p_mv += nodes.to(tl.int64) * D
        p_logs += nodes
        nodes, ancestor, span = above, parent, span * B
    return m, norm, acc


@triton.jit
def attend_extra(
    m, norm, acc, q, g, p_ek, p_ev, s_ek, s_ev, extra, scale,
    GRADIENT: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    INT64: tl.constexpr,
):  # fmt: skip
    """Attend to the extra keys, visible to all rows."""
    for start in tl.range(0, extra, BN, num_stages=STAGES):
        o_n = start + tl.arange(0, BN)
        bias = tl.where(o_n < extra, 0.0, MINUS_INF)[None, :]
        o_n = tl.minimum(o_n, extra - 1)
        m, norm, acc = _step(
            m, norm, acc, q, g, p_ek, p_ev, s_ek, s_ev, o_n, bias, scale, GRADIENT, False, D, BD, INT64
        )
    return m, norm, acc


@triton.jit
def attend_tokens(
    m, norm, acc, q, g, p_q, p_g, s_q, s_g, o_r, p_k, p_v, p_real, p_list, s_k, s_v, sample, row, tokens, top_k, scale,
    MASKED: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr,
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
        q = rows_of(p_q, s_q, o_r, D, BD, INT64)
        if GRADIENT:
            g = rows_of(p_g, s_g, o_r, D, BD, INT64)
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
            bias = tl.expand_dims(tl.where(real, 0.0, MINUS_INF), len(o_n.shape) - 1)
            o_n = tl.where(real, o_n, -1) if MASKED else tl.minimum(o_n, tokens - 1)
        m, norm, acc = _step(
            m, norm, acc, q, g, p_k, p_v, s_k, s_v, o_n, bias, scale, GRADIENT, EVEN, D, BD, INT64, MASKED
        )
    if G > 1:
        m, norm, acc = tl.reshape(m, [M]), tl.reshape(norm, [M]), tl.reshape(acc, [M, BD])
    return m, norm, acc


@triton.jit
def locate(tokens, heads, M: tl.constexpr):
    """Batch, head, sample (batch * heads + head) and first row, head by head, so that few heads share the cache."""
    groups = tl.cdiv(tokens, M)
    sample = (tl.program_id(0) // groups).to(tl.int64)
    return sample // heads, sample % heads, sample, tl.program_id(0) % groups * M


@triton.jit
def real_rows(p_real, row, tokens, MASKED: tl.constexpr, M: tl.constexpr):
    """Indices of the rows [M]; -1 for padding and rows past the end."""
    o_m = row + tl.arange(0, M)
    m_m = o_m < tokens
    if MASKED:
        m_m = m_m & (tl.load(p_real + o_m, mask=m_m, other=0) != 0)
    return tl.where(m_m, o_m, -1)


@triton.jit
def store_rows(p, stride, row, tokens, x, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    o_m, o_d = row + tl.arange(0, M), tl.arange(0, BD)
    m_x = (o_m < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(p + o_m[:, None].to(tl.int64) * stride + o_d[None, :], x.to(p.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    p_q, p_k, p_v, p_ek, p_ev, p_out, p_mk, p_mv, p_logs, p_real, p_list1, p_list2, p_list3, p_list4, p_lse, p_place,
    scale, heads, tokens, extra, nodes, top_k, s_log, s_real,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ekb, s_ekh, s_ek, s_evb, s_evh, s_ev, s_outb, s_outh, s_out,
    LEVELS: tl.constexpr, ENRICHED: tl.constexpr, REWEIGHT: tl.constexpr, EXCLUDE: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, EXTRA: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr, SMALL_STAGES: tl.constexpr,
):  # fmt: skip
    """Output and LSE; zeros and -inf for padding and for rows without keys.

    EVEN: all nodes, lists and steps are full, so that nothing needs a mask. EXTRA: there are extra keys.
    """
    batch, head, sample, row = locate(tokens, heads, M)
    p_real += batch * s_real
    o_m = real_rows(p_real, row, tokens, MASKED, M)
    o_r = tl.maximum(o_m, 0)
    p_q += batch * s_qb + head * s_qh
    q = rows_of(p_q, s_q, o_r, D, BD, INT64)  # [M, BD]
    m = tl.full([M], LOWEST, tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BD], tl.float32)
    if ENRICHED > 0:
        m, norm, acc = attend_means(
            m, norm, acc, q, q, p_mk + sample * nodes * D, p_mv + sample * nodes * D, p_logs + batch * s_log,
            (p_list1, p_list2, p_list3, p_list4), sample, row, tokens, top_k, scale,
            LEVELS, ENRICHED, REWEIGHT, EXCLUDE, MASKED, False, EVEN, STAGES, B, M, BN, D, BD, INT64,
        )  # fmt: skip
    if EXTRA:
        m, norm, acc = attend_extra(
            m, norm, acc, q, q, p_ek + batch * s_ekb + head * s_ekh, p_ev + batch * s_evb + head * s_evh, s_ek, s_ev,
            extra, scale, False, STAGES, BN, D, BD, INT64,
        )  # fmt: skip
    m, norm, acc = attend_tokens(
        m, norm, acc, q, q, p_q, p_q, s_q, s_q, o_r,
        p_k + batch * s_kb + head * s_kh, p_v + batch * s_vb + head * s_vh, p_real, p_list1, s_k, s_v,
        sample, row, tokens, top_k, scale, MASKED, False, EVEN, SMALL_STAGES, B, M, BK, D, BD, INT64,
    )  # fmt: skip
    norm = tl.where(o_m >= 0, norm, 0.0)
    acc = tl.where((norm != 0)[:, None], acc / norm[:, None], 0.0)  # NaN must propagate
    o_m, o_d = row + tl.arange(0, M), tl.arange(0, BD)
    m_m = o_m < tokens
    place = o_m if p_place is None else tl.load(p_place + o_m, mask=m_m, other=0)
    p_out += batch * s_outb + head * s_outh + place[:, None].to(tl.int64) * s_out + o_d[None, :]
    tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])
    lse = tl.where(norm != 0, (m + tl.math.log2(norm)) * LN2, MINUS_INF)
    tl.store(p_lse + sample * tokens + o_m, lse, mask=m_m)


SMALL_STAGES = 2  # pipeline stages of small steps


class KernelConfig(NamedTuple):
    """Tile sizes and launch options of a kernel of log-linear attention.

    Attributes:
        rows: Queries of a program.
        step: Keys of a wide step, which all queries of the program read.
        small: Keys of a small step, which one block of queries reads.
        warps: Warps of a program.
        stages: Pipeline stages of wide steps.
        registers: Largest number of registers of a thread, so that more programs are resident; None lets the compiler
            choose.
    """

    rows: int
    step: int
    small: int
    warps: int
    stages: int
    registers: int | None


# By the largest supported head_dim: the fastest configurations that hardly spill registers.
FORWARD = {
    64: KernelConfig(64, 64, 32, 4, 2, 96),
    128: KernelConfig(64, 64, 16, 4, 3, None),
    256: KernelConfig(64, 32, 16, 8, 2, None),
}


def config_for(configs: dict[int, KernelConfig], head_dim: int) -> KernelConfig:
    """Configuration for a head_dim; `configs` is indexed by the largest supported head_dim."""
    return next(config for largest, config in configs.items() if head_dim <= largest)


def register_limit(config: KernelConfig) -> dict[str, int]:
    """Launch option that limits the registers of a thread."""
    return {} if config.registers is None else {"maxnreg": config.registers}


class Keys(NamedTuple):
    """Keys and values that queries may read, and the options that decide which of them they read.

    The last dimension of all tensors [batch, heads, tokens, dim] has stride 1.

    Attributes:
        k: Keys [batch, heads, tokens, dim].
        v: Values.
        extra_k: Keys that every query reads [batch, heads, extra, dim]; extra may be 0.
        extra_v: Values of the extra keys.
        means: Means [tensors, batch, heads, nodes of all levels, dim]; the last two are the means of k and v.
        counts: Number of real tokens in each node: int32 [1 or batch, nodes of all levels].
        logs: Binary logarithms of the counts.
        lists: Nodes that each node picked, for each level, the finest first: int32 [batch, heads, nodes, picks].
        real: Contiguous bool [batch, tokens], False where a token is padding.
        block: Tokens of a block.
        top_k: Largest number of picks of a node.
        enriched: Number of levels with means to read, from the finest.
        reweight: Whether a mean counts once for each of its tokens.
        exclude: Whether queries skip the means of nodes that their ancestors picked.
        full: Whether lists are known to have no gaps.
        scale: Factor on q·k, above 0.
    """

    k: Tensor
    v: Tensor
    extra_k: Tensor
    extra_v: Tensor
    means: Tensor
    counts: Tensor
    logs: Tensor
    lists: list[Tensor]
    real: Tensor | None
    block: int
    top_k: int
    enriched: int
    reweight: bool
    exclude: bool
    full: bool
    scale: float


def forward(q: Tensor, keys: Keys, out: Tensor, scatter: Tensor | None) -> Tensor:
    """Write the output of each query to its row of `out`, or the row that `scatter` names for it.

    Returns:
        Natural LSE, float32 [batch, heads, tokens].
    """
    lse = empty_lse(q)
    _launch_forward(q, keys, out, lse, scatter)
    return lse


@launcher
def _launch_forward(q: Tensor, keys: Keys, out: Tensor, lse: Tensor, scatter: Tensor | None) -> Launch:
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v, "out": out}
    return over_queries(_forward, FORWARD, strided, keys, p_lse=lse, p_place=scatter)


def mask_of(keys: Keys) -> Tensor:
    """Mask of real tokens for a kernel, or any tensor without a mask."""
    return keys.counts if keys.real is None else keys.real.view(torch.uint8)


def batch_stride(x: Tensor | None) -> int:
    """Stride of the first dimension; 0 for one row shared by the whole batch."""
    return 0 if x is None or len(x) == 1 else x.stride(0)


def needs_int64(tensors: Iterable[Tensor]) -> bool:
    """Whether offsets within one head may exceed 32 bits."""
    return any(x.stride(2) * x.shape[2] >= 2**31 for x in tensors)


def over_queries(
    kernel: Any, configs: dict[int, KernelConfig], strided: dict[str, Tensor], keys: Keys, **more: Any
) -> Launch:
    """Launch of a kernel over groups of queries; arguments have the names of the kernel's parameters."""
    batch, heads, tokens, dim = strided["q"].shape
    config = config_for(configs, dim)
    lists = keys.lists + keys.lists[:1] * (4 - len(keys.lists))
    named = {
        **{f"p_{name}": x for name, x in strided.items()},
        **{f"s_{name}{axis}": x.stride(i) for name, x in strided.items() for i, axis in enumerate(("b", "h", ""))},
        **{f"p_list{i + 1}": x for i, x in enumerate(lists)},
        **more,
        "p_mk": keys.means[-2],
        "p_mv": keys.means[-1],
        "p_logs": keys.logs,
        "p_real": mask_of(keys),
        "scale": keys.scale / math.log(2),
        "heads": heads,
        "tokens": tokens,
        "extra": keys.extra_k.shape[2],
        "nodes": keys.logs.shape[1],
        "top_k": keys.top_k,
        "s_log": batch_stride(keys.logs),
        "s_real": batch_stride(keys.real),
    }
    constants = {
        "LEVELS": len(keys.lists),
        "ENRICHED": keys.enriched,
        "REWEIGHT": keys.reweight,
        "EXCLUDE": keys.exclude,
        "MASKED": keys.real is not None,
        "EVEN": _even(keys, tokens, config),
        "EXTRA": keys.extra_k.shape[2] > 0,
        "B": keys.block,
        "M": config.rows,
        "BN": _wide(keys, config),
        "BK": _small(keys, config),
        "D": dim,
        "BD": padded_size(dim),
        "INT64": needs_int64(strided.values()),
        "STAGES": config.stages,
        "SMALL_STAGES": SMALL_STAGES,
        "num_warps": config.warps,
        **register_limit(config),
    }
    args = [named[name] for name in kernel.arg_names[: len(named)]]  # constants follow
    return Launch(kernel, (batch * heads * triton.cdiv(tokens, config.rows),), args, constants)


def _wide(keys: Keys, config: KernelConfig) -> int:
    """Keys of a wide step: whole blocks."""
    return max(config.step, keys.block)


def _small(keys: Keys, config: KernelConfig) -> int:
    """Blocks of a small step, at least one."""
    return max(config.small // keys.block, 1)


def _even(keys: Keys, tokens: int, config: KernelConfig) -> bool:
    """Whether all nodes, lists and steps are full, so that the kernel needs no masks."""
    levels, wide = len(keys.lists), _wide(keys, config)
    whole = keys.full and keys.real is None and tokens % keys.block**levels == 0 and tokens % config.rows == 0
    top, picks = tokens // keys.block**levels, [chosen.shape[3] for chosen in keys.lists]
    steps = [picks[0] * keys.block % (_small(keys, config) * keys.block)]
    if keys.enriched == levels:
        steps.append(top % wide)
    steps += [above * keys.block % wide for above in picks[1 : keys.enriched + 1]]
    return whole and not any(steps)
