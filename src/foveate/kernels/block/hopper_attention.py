# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false
"""Forward attention over a schedule on Hopper, in Gluon.

Persistent programs, one per multiprocessor, each work through a list of tiles of 128 rows. A producer warp copies
queries and, step by step, 128 keys and values into a ring of buffers. Two consumer warpgroups compute 64 rows each:
they start the scores of step i before they multiply the values of step i - 1, and they alternate, so that the softmax
of one overlaps with the matrix products of the other.

Heads may share keys (grouped-query attention). With NUMBERED, each query has a position and attends causally to the
keys up to it; all rows of a tile then read the whole of its full steps.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foveate.kernels.block.schedule import Schedule
from foveate.kernels.launch import Launch, launcher

__all__ = ["CUT", "addressable", "descriptor", "forward", "launch", "matrix_of", "tile_of"]

load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed by Triton
ROWS = STEP = 128
STAGES = {64: 3, 128: 2}
CUT = {"rows": ROWS, "step": STEP, "short": STEP}  # arguments of `schedule`
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

LN2 = gl.constexpr(0.6931471805599453)
HALF = gl.constexpr(64)  # rows of one warpgroup: half of a tile


@gluon.jit
def tile_of(p_work, p_tiles, work, heads):
    """Batch, head, first row, end row, first full step, first short step and end step of a work item."""
    tile, sample = gl.load(p_work + 2 * work), gl.load(p_work + 2 * work + 1)
    p_tile = p_tiles + 5 * tile
    return (
        sample // heads, sample % heads, gl.load(p_tile), gl.load(p_tile + 1),
        gl.load(p_tile + 2), gl.load(p_tile + 3), gl.load(p_tile + 4),
    )  # fmt: skip


@gluon.jit
def _produce(
    d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_work, p_tiles, p_steps, begin, end, heads, share,
    q_batch, q_head, q_column, k_batch, k_head, k_column, v_batch, v_head, v_column, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy queries, keys and values into buffers as these become free; for rows and columns see `_Matrix`."""
    ring = 0
    for work in range(begin, end):
        batch, head, row, _, full, _, done = tile_of(p_work, p_tiles, work, heads)
        slot, turn = (work - begin) % 2, (work - begin) // 2
        mbarrier.wait(q_empty.index(slot), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * d_q.block_type.nbytes)
        q_row = batch * q_batch + head * q_head + row
        for half in gl.static_range(2):
            load_block(d_q, [q_row + half * HALF, head * q_column], q_full.index(slot), b_q.index(2 * slot + half))
        group = head // share
        k_row, v_row = batch * k_batch + group * k_head, batch * v_batch + group * v_head
        for step in range(full, done):
            first = gl.load(p_steps + 2 * step)
            stage, phase = ring % STAGES, (ring // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), d_k.block_type.nbytes)
            load_block(d_k, [k_row + first, group * k_column], k_full.index(stage), b_k.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), d_v.block_type.nbytes)
            load_block(d_v, [v_row + first, group * v_column], v_full.index(stage), b_v.index(stage))
            ring += 1


@gluon.jit
def _masked(scores, p_steps, step, at, BN: gl.constexpr, LAYOUT: gl.constexpr, NUMBERED: gl.constexpr):
    """Scores with -inf beyond the end of the step or, if NUMBERED, beyond the row's position."""
    first, end = gl.load(p_steps + 2 * step), gl.load(p_steps + 2 * step + 1)
    column = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    if NUMBERED:
        return gl.where(gl.expand_dims(first + column, 0) <= gl.expand_dims(at, 1), scores, -float("inf"))
    length = end - first
    return gl.where(gl.expand_dims(column < length, 0), scores, -float("inf"))


@gluon.jit
def _attend(
    m, norm, p, acc, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, at, ring, turn,
    scale, WHO: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    MASK: gl.constexpr, NUMBERED: gl.constexpr,
):  # fmt: skip
    """One step of online softmax, overlapped with the product of the previous weights `p` and values."""
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    stage, phase = ring % STAGES, (ring // STAGES) & 1
    before, before_phase = (ring - 1) % STAGES, ((ring - 1) // STAGES) & 1
    p = gl.convert_layout(p.to(b_v.dtype), weights)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), before_phase)
    mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    scores = warpgroup_mma(q, b_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, b_v.index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        scores = _masked(scores, p_steps, step, at, BN, SCORES, NUMBERED)
    m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    p = gl.exp2(scores * scale - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    norm = norm * shrink + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT)), 1)
    return m_new, norm, p, acc


@gluon.jit
def _consume(
    WHO: gl.constexpr, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    p_out, p_lse, p_at, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale, s_ob, s_oh, s_o,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, NUMBERED: gl.constexpr, SCATTER: gl.constexpr,
):  # fmt: skip
    """Output and LSE of one warpgroup's half of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, OUT)
    ring, turn = 0, 0
    for work in range(begin, end):
        batch, head, row, row_end, full, short, done = tile_of(p_work, p_tiles, work, heads)
        slot = (work - begin) % 2
        q = b_q.index(2 * slot + WHO)
        at = 0
        if NUMBERED:
            o_at = row + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
            at = gl.load(p_at + o_at, mask=o_at < row_end, other=0)
        # first step: there are no values to multiply yet
        mbarrier.wait(q_full.index(slot), ((work - begin) // 2) & 1)
        mbarrier.wait(k_full.index(ring % STAGES), (ring // STAGES) & 1)
        zero = gl.zeros([HALF, BN], gl.float32, SCORES)
        scores = warpgroup_mma(q, b_k.index(ring % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(ring % STAGES), count=1)
        scores = _masked(scores, p_steps, full, at, BN, SCORES, NUMBERED)
        m = gl.max(scores, 1) * scale
        p = gl.exp2(scores * scale - gl.expand_dims(m, 1))
        norm = gl.sum(p, 1)
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        ring += 1
        middle = gl.maximum(short, full + 1)
        for step in range(full + 1, middle):
            m, norm, p, acc = _attend(
                m, norm, p, acc, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, at, ring,
                turn, scale, WHO, BN, STAGES, SCORES, OUT, False, NUMBERED,
            )  # fmt: skip
            ring += 1
            turn += 1
        for step in range(middle, done):
            m, norm, p, acc = _attend(
                m, norm, p, acc, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, at, ring,
                turn, scale, WHO, BN, STAGES, SCORES, OUT, True, NUMBERED,
            )  # fmt: skip
            ring += 1
            turn += 1
        mbarrier.arrive(q_empty.index(slot), count=1)
        # values of the last step
        before, before_phase = (ring - 1) % STAGES, ((ring - 1) // STAGES) & 1
        p = gl.convert_layout(p.to(b_v.dtype), weights)
        mbarrier.wait(v_full.index(before), before_phase)
        acc = warpgroup_mma(p, b_v.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        lse = gl.convert_layout((m + gl.log2(norm)) * LN2, rows)
        out = acc / gl.expand_dims(gl.convert_layout(norm, rows), 1)
        o_m = row + WHO * HALF + gl.arange(0, HALF, rows)
        o_d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        sample = (batch * heads + head).to(gl.int64)
        gl.store(p_lse + sample * queries + o_m, lse, mask=o_m < row_end)
        place = gl.load(p_place + o_m, mask=o_m < row_end, other=0) if SCATTER else o_m
        p_o = p_out + batch.to(gl.int64) * s_ob + head.to(gl.int64) * s_oh
        p_o = p_o + gl.expand_dims(place.to(gl.int64) * s_o, 1) + gl.expand_dims(o_d, 0)
        gl.store(p_o, out.to(b_v.dtype), mask=gl.expand_dims(o_m < row_end, 1))


@gluon.jit
def forward(
    d_q, d_k, d_v, p_out, p_lse, p_at, p_place, p_tiles, p_steps, p_work, p_bounds, scale, heads, share, queries,
    q_batch, q_head, q_column, k_batch, k_head, k_column, v_batch, v_head, v_column, s_ob, s_oh, s_o,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, NUMBERED: gl.constexpr, SCATTER: gl.constexpr,
):  # fmt: skip
    """Output and LSE of the tiles of this program."""
    begin, end = gl.load(p_bounds + gl.program_id(0)), gl.load(p_bounds + gl.program_id(0) + 1)
    b_q = gl.allocate_shared_memory(d_q.dtype, [4, HALF, D], d_q.layout)
    b_k = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_k.layout)
    b_v = gl.allocate_shared_memory(d_v.dtype, [STAGES, BN, D], d_v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            p_out, p_lse, p_at, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale, s_ob, s_oh, s_o,
            D, BN, STAGES, NUMBERED, SCATTER,
        )),
        (_consume, (
            1, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            p_out, p_lse, p_at, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale, s_ob, s_oh, s_o,
            D, BN, STAGES, NUMBERED, SCATTER,
        )),
        (_produce, (
            d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            p_work, p_tiles, p_steps, begin, end, heads, share,
            q_batch, q_head, q_column, k_batch, k_head, k_column, v_batch, v_head, v_column, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


# --- launch ----------------------------------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """[batch, heads, tokens, D] as a matrix for the copy engine.

    Token n of head (b, h) begins in row ``b * batch + h * head + n``, column ``h * column``.
    """

    rows: int
    columns: int
    stride: int
    batch: int
    head: int
    column: int


def addressable(*tensors: Tensor) -> bool:
    """Whether the copy engine can read [batch, heads, tokens, D]: D is 64 or 128, every token on 16 bytes."""
    return all(x.shape[3] in STAGES and matrix_of(x) is not None for x in tensors)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Schedule,
    scale: float,
    positions: Tensor | None = None,
    scatter: Tensor | None = None,
) -> None:
    """Write `out` and `lse` of every query with keys to read.

    Args:
        q: Queries [batch, heads, queries, D]; q, k and v must be `addressable`.
        k: Keys [batch, groups, keys, D]; head h reads group h // (heads / groups).
        v: Values, shaped like k.
        out: Output, shaped like q.
        lse: Per-query log-sum-exp, contiguous float32 [batch, heads, queries].
        plan: Schedule of the table, made with `CUT`, with the work of each program.
        scale: Factor on q·k.
        positions: Last visible key of each query, int32. Without it, short steps end as in the schedule.
        scatter: Position of each query in `out`. Without it, queries keep their order.
    """
    _launch(q, k, v, out, lse, positions, scatter, plan.tiles, plan.steps, plan.items, plan.bounds, scale)


@launcher
def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, positions: Tensor | None, scatter: Tensor | None,
    tiles: Tensor, steps: Tensor, items: Tensor, bounds: Tensor, scale: float,
) -> Launch:  # fmt: skip
    head_dim = q.shape[3]
    matrices = [matrix_of(x) for x in (q, k, v)]
    blocks = [ROWS // 2, head_dim], [STEP, head_dim], [STEP, head_dim]
    args = (
        *(descriptor(x, matrix, block) for x, matrix, block in zip((q, k, v), matrices, blocks, strict=True)),
        out, lse, *(lse if x is None else x for x in (positions, scatter)), tiles, steps, items, bounds,
        scale / math.log(2), q.shape[1], q.shape[1] // k.shape[1], q.shape[2],
        *(number for x in matrices for number in x[3:]), *out.stride()[:3],
    )  # fmt: skip
    constants = {
        "D": head_dim, "BN": STEP, "STAGES": STAGES[head_dim], "NUMBERED": positions is not None,
        "SCATTER": scatter is not None, "num_warps": 4,
    }  # fmt: skip
    return Launch(forward, (len(bounds) - 1,), args, constants)


def descriptor(x: Tensor, matrix: _Matrix, block: list[int]) -> TensorDescriptor:
    """Tensor descriptor for the copy engine: a tensor as a matrix, and the blocks to copy."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, [matrix.rows, matrix.columns], [matrix.stride, 1], block, layout)


def matrix_of(x: Tensor) -> _Matrix | None:
    """[batch, heads, tokens, D] as a matrix that the copy engine can address, or None if impossible."""
    return _matrix(x.shape, x.stride(), x.element_size(), x.data_ptr() % 16 == 0)


@lru_cache(4096)
def _matrix(shape: tuple[int, ...], strides: tuple[int, ...], item: int, aligned: bool) -> _Matrix | None:
    (batch, heads, tokens, dim), (s_b, s_h, s_n, s_d) = shape, strides
    s_b, s_h = s_b if batch > 1 else 0, s_h if heads > 1 else 0
    if not math.prod(shape) or s_d != 1 or not s_n or s_n * item % 16 or not aligned or s_b % s_n:
        return None
    head, column = (s_h // s_n, 0) if s_h % s_n == 0 else (0, s_h)
    columns = (heads - 1) * column + dim
    if columns > s_n:
        return None
    rows = (batch - 1) * (s_b // s_n) + (heads - 1) * head + tokens
    if rows > tokens * (batch if s_b else 1) * (heads if head else 1):
        return None  # a step may reach into memory between heads, and 0 * NaN is NaN
    return _Matrix(rows, columns, s_n, s_b // s_n, head, column)
