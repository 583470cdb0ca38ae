# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false
"""Gradients of attention over a schedule on Hopper, in Gluon.

Two passes, each built like the forward kernel: a producer warp fills buffers, two warpgroups compute 64 rows of a tile
each and alternate. `backward_queries` walks through the keys of each tile of queries, `backward_keys` through the
queries that read each tile of keys. There are no atomic additions, so results are deterministic.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foveate.kernels.block.hopper_attention import DTYPES, HALF, ROWS, descriptor, load_block, matrix_of, tile_of
from foveate.kernels.block.schedule import Schedule
from foveate.kernels.launch import Launch, launcher

__all__ = ["CUT", "backward_keys", "backward_queries", "launch_keys", "launch_queries"]

STEP = 64
STAGES = {64: 4, 128: 3}
LOG2E = gl.constexpr(1.4426950408889634)
ALIGNED = gl.constexpr(4)  # the copy engine reads float32 vectors from multiples of 4
CUT = {"rows": ROWS, "step": STEP, "short": STEP, "aligned": 4}  # arguments of `schedule`


@gluon.jit
def _produce(
    d_a, d_b, d_x, d_y, d_lse, d_delta, b_a, b_b, b_x, b_y, b_lse, b_delta, tile_full, tile_empty, full, empty,
    p_work, p_tiles, p_steps, begin, end, heads, queries,
    a_batch, a_head, a_column, b_batch, b_head, b_column, x_batch, x_head, x_column, y_batch, y_head, y_column,
    STAGES: gl.constexpr, VECTORS: gl.constexpr,
):  # fmt: skip
    """Copy a and b once per tile and x and y once per step; with VECTORS, LSE and delta once per step too."""
    ring = 0
    for work in range(begin, end):
        batch, head, row, _, first_step, _, done = tile_of(p_work, p_tiles, work, heads)
        slot, turn = (work - begin) % 2, (work - begin) // 2
        mbarrier.wait(tile_empty.index(slot), (turn & 1) ^ 1)
        mbarrier.expect(tile_full.index(slot), 2 * d_a.block_type.nbytes + 2 * d_b.block_type.nbytes)
        a_row, b_row = batch * a_batch + head * a_head + row, batch * b_batch + head * b_head + row
        for half in gl.static_range(2):
            place = 2 * slot + half
            load_block(d_a, [a_row + half * HALF, head * a_column], tile_full.index(slot), b_a.index(place))
            load_block(d_b, [b_row + half * HALF, head * b_column], tile_full.index(slot), b_b.index(place))
        x_row, y_row = batch * x_batch + head * x_head, batch * y_batch + head * y_head
        sample = (batch * heads + head) * queries
        for step in range(first_step, done):
            first = gl.load(p_steps + 2 * step) // ALIGNED * ALIGNED
            stage, phase = ring % STAGES, (ring // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            size: gl.constexpr = d_x.block_type.nbytes + d_y.block_type.nbytes
            if VECTORS:
                mbarrier.expect(full.index(stage), size + d_lse.block_type.nbytes + d_delta.block_type.nbytes)
                load_block(d_lse, [sample + first], full.index(stage), b_lse.index(stage))
                load_block(d_delta, [sample + first], full.index(stage), b_delta.index(stage))
            else:
                mbarrier.expect(full.index(stage), size)
            load_block(d_x, [x_row + first, head * x_column], full.index(stage), b_x.index(stage))
            load_block(d_y, [y_row + first, head * y_column], full.index(stage), b_y.index(stage))
            ring += 1


@gluon.jit
def _inside(p_steps, step, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Mask of the columns inside the step."""
    first, end = gl.load(p_steps + 2 * step), gl.load(p_steps + 2 * step + 1)
    column = first // ALIGNED * ALIGNED + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    return (first <= column) & (column < end)


@gluon.jit
def _store(p_x, x, rows_end, batch, head, row, s_b, s_h, s_n, D: gl.constexpr, dtype: gl.constexpr, OUT: gl.constexpr):
    o_m = row + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    p_m = p_x + batch.to(gl.int64) * s_b + head.to(gl.int64) * s_h + gl.expand_dims(o_m.to(gl.int64) * s_n, 1)
    p_m = p_m + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OUT)), 0)
    gl.store(p_m, x.to(dtype), mask=gl.expand_dims(o_m < rows_end, 1))


@gluon.jit
def _key_step(
    dq, ds, q, g, lse, delta, b_k, b_v, full, empty, turns, p_steps, step, ring, scale,
    WHO: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    FIRST: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Scores and their gradient of one step of keys, overlapped with the previous step's product into dq."""
    stage, before = ring % STAGES, (ring - 1) % STAGES
    left = gl.convert_layout(ds.to(b_k.dtype), gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    mbarrier.wait(full.index(stage), (ring // STAGES) & 1)
    mbarrier.wait(turns.index(WHO), (ring & 1) ^ (1 - WHO))
    if not FIRST:
        dq = warpgroup_mma(left, b_k.index(before), dq, is_async=True)
    scores = warpgroup_mma(q, b_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(g, b_v.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO), count=1)
    if FIRST:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores, dq = warpgroup_mma_wait(1, deps=(scores, dq))
        mbarrier.arrive(empty.index(before), count=1)
    p = gl.exp2(scores * scale - lse)
    if MASK:
        p = gl.where(gl.expand_dims(_inside(p_steps, step, BN, SCORES), 0), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return dq, p * (dp - delta)


@gluon.jit
def _consume_keys(
    WHO: gl.constexpr, b_q, b_g, b_k, b_v, tile_full, tile_empty, full, empty, turns,
    p_lse, p_delta, p_dq, p_work, p_tiles, p_steps, begin, end, heads, queries, scale, factor, s_b, s_h, s_n,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradient of one warpgroup's half of each tile of queries."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    ring = 0
    for work in range(begin, end):
        batch, head, row, row_end, first, short, done = tile_of(p_work, p_tiles, work, heads)
        o_m = row + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        p_m = (batch * heads + head).to(gl.int64) * queries + o_m
        lse = gl.expand_dims(gl.load(p_lse + p_m, mask=o_m < row_end, other=0.0) * LOG2E, 1)
        delta = gl.expand_dims(gl.load(p_delta + p_m, mask=o_m < row_end, other=0.0), 1)
        slot = (work - begin) % 2
        mbarrier.wait(tile_full.index(slot), ((work - begin) // 2) & 1)
        q, g = b_q.index(2 * slot + WHO), b_g.index(2 * slot + WHO)
        dq = gl.zeros([HALF, D], gl.float32, OUT)
        ds = gl.zeros([HALF, BN], gl.float32, SCORES)
        dq, ds = _key_step(
            dq, ds, q, g, lse, delta, b_k, b_v, full, empty, turns, p_steps, first, ring, scale,
            WHO, BN, STAGES, SCORES, OUT, True, True,
        )  # fmt: skip
        middle = gl.maximum(short, first + 1)
        for step in range(first + 1, middle):
            dq, ds = _key_step(
                dq, ds, q, g, lse, delta, b_k, b_v, full, empty, turns, p_steps, step, ring + step - first, scale,
                WHO, BN, STAGES, SCORES, OUT, False, False,
            )  # fmt: skip
        for step in range(middle, done):
            dq, ds = _key_step(
                dq, ds, q, g, lse, delta, b_k, b_v, full, empty, turns, p_steps, step, ring + step - first, scale,
                WHO, BN, STAGES, SCORES, OUT, False, True,
            )  # fmt: skip
        ring += done - first
        last = (ring - 1) % STAGES
        left = gl.convert_layout(ds.to(b_k.dtype), gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
        dq = warpgroup_mma(left, b_k.index(last), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(empty.index(last), count=1)
        mbarrier.arrive(tile_empty.index(slot), count=1)
        _store(p_dq, dq * factor, row_end, batch, head, row + WHO * HALF, s_b, s_h, s_n, D, b_k.dtype, OUT)


@gluon.jit
def _query_step(
    dk, dv, ds, k, v, b_q, b_g, b_lse, b_delta, full, empty, turns, p_steps, step, ring, scale,
    WHO: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    FIRST: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Add one step of queries to dv, overlapped with the previous step's product into dk."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    stage, before = ring % STAGES, (ring - 1) % STAGES
    q, g = b_q.index(stage), b_g.index(stage)
    left = gl.convert_layout(ds, LEFT)
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    mbarrier.wait(full.index(stage), (ring // STAGES) & 1)
    mbarrier.wait(turns.index(WHO), (ring & 1) ^ (1 - WHO))
    if not FIRST:
        dk = warpgroup_mma(left, b_q.index(before), dk, is_async=True)
    scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO), count=1)
    if FIRST:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores, dk = warpgroup_mma_wait(1, deps=(scores, dk))
        mbarrier.arrive(empty.index(before), count=1)
    lse = b_lse.index(stage).load(COLUMNS) * LOG2E
    if MASK:
        lse = gl.where(_inside(p_steps, step, BN, SCORES), lse, float("inf"))  # their weights are 0
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    dv = warpgroup_mma(gl.convert_layout(p.to(b_q.dtype), LEFT), g, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = (p * (dp - gl.expand_dims(b_delta.index(stage).load(COLUMNS), 0))).to(b_q.dtype)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return dk, dv, ds


@gluon.jit
def _consume_queries(
    WHO: gl.constexpr, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty, turns,
    p_dk, p_dv, p_work, p_tiles, p_steps, begin, end, heads, scale, factor, k_b, k_h, k_n, v_b, v_h, v_n,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of one warpgroup's half of each tile of keys and values."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    ring = 0
    for work in range(begin, end):
        batch, head, row, row_end, first, short, done = tile_of(p_work, p_tiles, work, heads)
        slot = (work - begin) % 2
        mbarrier.wait(tile_full.index(slot), ((work - begin) // 2) & 1)
        k, v = b_k.index(2 * slot + WHO), b_v.index(2 * slot + WHO)
        dk, dv = gl.zeros([HALF, D], gl.float32, OUT), gl.zeros([HALF, D], gl.float32, OUT)
        ds = gl.zeros([HALF, BN], b_q.dtype, SCORES)
        dk, dv, ds = _query_step(
            dk, dv, ds, k, v, b_q, b_g, b_lse, b_delta, full, empty, turns, p_steps, first, ring, scale,
            WHO, BN, STAGES, SCORES, OUT, True, True,
        )  # fmt: skip
        middle = gl.maximum(short, first + 1)
        for step in range(first + 1, middle):
            dk, dv, ds = _query_step(
                dk, dv, ds, k, v, b_q, b_g, b_lse, b_delta, full, empty, turns, p_steps, step, ring + step - first,
                scale, WHO, BN, STAGES, SCORES, OUT, False, False,
            )  # fmt: skip
        for step in range(middle, done):
            dk, dv, ds = _query_step(
                dk, dv, ds, k, v, b_q, b_g, b_lse, b_delta, full, empty, turns, p_steps, step, ring + step - first,
                scale, WHO, BN, STAGES, SCORES, OUT, False, True,
            )  # fmt: skip
        ring += done - first
        last = (ring - 1) % STAGES
        left = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2))
        dk = warpgroup_mma(left, b_q.index(last), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(empty.index(last), count=1)
        mbarrier.arrive(tile_empty.index(slot), count=1)
        _store(p_dk, dk * factor, row_end, batch, head, row + WHO * HALF, k_b, k_h, k_n, D, b_q.dtype, OUT)
        _store(p_dv, dv, row_end, batch, head, row + WHO * HALF, v_b, v_h, v_n, D, b_q.dtype, OUT)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return tile_full, tile_empty, full, empty, turns


@gluon.jit
def backward_queries(
    d_q, d_g, d_k, d_v, p_lse, p_delta, p_dq, p_tiles, p_steps, p_work, p_bounds, scale, factor, heads, queries,
    q_batch, q_head, q_column, g_batch, g_head, g_column, k_batch, k_head, k_column, v_batch, v_head, v_column,
    s_b, s_h, s_n, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradient of the queries."""
    begin, end = gl.load(p_bounds + gl.program_id(0)), gl.load(p_bounds + gl.program_id(0) + 1)
    b_q = gl.allocate_shared_memory(d_q.dtype, [4, HALF, D], d_q.layout)
    b_g = gl.allocate_shared_memory(d_q.dtype, [4, HALF, D], d_q.layout)
    b_k = gl.allocate_shared_memory(d_q.dtype, [STAGES, BN, D], d_k.layout)
    b_v = gl.allocate_shared_memory(d_q.dtype, [STAGES, BN, D], d_k.layout)
    tile_full, tile_empty, full, empty, turns = _barriers(STAGES)
    gl.warp_specialize([
        (_consume_keys, (
            0, b_q, b_g, b_k, b_v, tile_full, tile_empty, full, empty, turns, p_lse, p_delta, p_dq,
            p_work, p_tiles, p_steps, begin, end, heads, queries, scale, factor, s_b, s_h, s_n, D, BN, STAGES,
        )),
        (_consume_keys, (
            1, b_q, b_g, b_k, b_v, tile_full, tile_empty, full, empty, turns, p_lse, p_delta, p_dq,
            p_work, p_tiles, p_steps, begin, end, heads, queries, scale, factor, s_b, s_h, s_n, D, BN, STAGES,
        )),
        (_produce, (
            d_q, d_g, d_k, d_v, d_k, d_k, b_q, b_g, b_k, b_v, b_k, b_k, tile_full, tile_empty, full, empty,
            p_work, p_tiles, p_steps, begin, end, heads, queries, q_batch, q_head, q_column, g_batch, g_head, g_column,
            k_batch, k_head, k_column, v_batch, v_head, v_column, STAGES, False,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def backward_keys(
    d_k, d_v, d_q, d_g, d_lse, d_delta, p_dk, p_dv, p_tiles, p_steps, p_work, p_bounds, scale, factor, heads, queries,
    k_batch, k_head, k_column, v_batch, v_head, v_column, q_batch, q_head, q_column, g_batch, g_head, g_column,
    k_b, k_h, k_n, v_b, v_h, v_n, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values."""
    begin, end = gl.load(p_bounds + gl.program_id(0)), gl.load(p_bounds + gl.program_id(0) + 1)
    b_k = gl.allocate_shared_memory(d_k.dtype, [4, HALF, D], d_k.layout)
    b_v = gl.allocate_shared_memory(d_k.dtype, [4, HALF, D], d_k.layout)
    b_q = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_q.layout)
    b_g = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_q.layout)
    b_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BN], d_lse.layout)
    b_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BN], d_lse.layout)
    tile_full, tile_empty, full, empty, turns = _barriers(STAGES)
    gl.warp_specialize([
        (_consume_queries, (
            0, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty, turns, p_dk, p_dv,
            p_work, p_tiles, p_steps, begin, end, heads, scale, factor, k_b, k_h, k_n, v_b, v_h, v_n, D, BN, STAGES,
        )),
        (_consume_queries, (
            1, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty, turns, p_dk, p_dv,
            p_work, p_tiles, p_steps, begin, end, heads, scale, factor, k_b, k_h, k_n, v_b, v_h, v_n, D, BN, STAGES,
        )),
        (_produce, (
            d_k, d_v, d_q, d_g, d_lse, d_delta, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty,
            p_work, p_tiles, p_steps, begin, end, heads, queries, k_batch, k_head, k_column, v_batch, v_head, v_column,
            q_batch, q_head, q_column, g_batch, g_head, g_column, STAGES, True,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


# --- launch ----------------------------------------------------------------------------------------------------------


def launch_queries(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    plan: Schedule, scale: float,
) -> None:  # fmt: skip
    """Write `dq` of every query with keys to read.

    Args:
        q: Queries [batch, heads, queries, D]; q, k, v and grad_out must be `hopper_attention.addressable`.
        k: Keys.
        v: Values.
        grad_out: Gradient of the output.
        lse: Per-query log-sum-exp, contiguous float32 [batch, heads, queries].
        delta: sum(out * grad_out) less the gradient of the LSE, shaped like lse.
        dq: Gradient of the queries, shaped like q.
        plan: Schedule of the table, made with `CUT`, with the work of each program.
        scale: Factor on q·k.
    """
    _launch_queries(q, grad_out, k, v, lse, delta, dq, plan.tiles, plan.steps, plan.items, plan.bounds, scale)


def launch_keys(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    plan: Schedule, scale: float,
) -> None:  # fmt: skip
    """Write `dk` and `dv` of every key that queries read: like `launch_queries`, over the transposed table."""
    if beyond := -q.shape[2] % CUT["aligned"]:
        lse, delta = pad(lse, (0, beyond)), pad(delta, (0, beyond))
    _launch_keys(k, v, q, grad_out, lse, delta, dk, dv, plan.tiles, plan.steps, plan.items, plan.bounds, scale)


@launcher
def _launch_queries(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    tiles: Tensor, steps: Tensor, items: Tensor, bounds: Tensor, scale: float,
) -> Launch:  # fmt: skip
    lists = tiles, steps, items, bounds
    return _pass(backward_queries, (q, grad_out), (k, v), [lse, delta], [dq], lists, lse.shape[2], scale)


@launcher
def _launch_keys(
    k: Tensor, v: Tensor, q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    tiles: Tensor, steps: Tensor, items: Tensor, bounds: Tensor, scale: float,
) -> Launch:  # fmt: skip
    vectors = [_vector(x, [STEP]) for x in (lse, delta)]
    lists = tiles, steps, items, bounds
    return _pass(backward_keys, (k, v), (q, grad_out), vectors, [dk, dv], lists, lse.shape[2], scale)


def _pass(
    kernel: Any, tile: tuple[Tensor, ...], steps: tuple[Tensor, ...], vectors: Sequence[Any],
    grads: Sequence[Tensor], lists: tuple[Tensor, ...], queries: int, scale: float,
) -> Launch:  # fmt: skip
    """Launch of one pass.

    Args:
        kernel: Kernel of the pass.
        tile: Tensors to copy once per tile.
        steps: Tensors to copy once per step.
        vectors: LSE and delta in the kernel's format.
        grads: Outputs.
        lists: Tiles and steps of the schedule, and items and bounds of the partition.
        queries: Number of queries of LSE and delta.
        scale: Factor on q·k.
    """
    head_dim, heads = tile[0].shape[3], tile[0].shape[1]
    matrices = [matrix_of(x) for x in (*tile, *steps)]
    blocks = [64, head_dim], [64, head_dim], [STEP, head_dim], [STEP, head_dim]
    args = (
        *(descriptor(x, *rest) for x, *rest in zip((*tile, *steps), matrices, blocks, strict=True)),
        *vectors, *grads, *lists, scale / math.log(2), scale, heads, queries,
        *(number for x in matrices for number in x[3:]),
        *(stride for x in grads for stride in x.stride()[:3]),
    )  # fmt: skip
    constants = {"D": head_dim, "BN": STEP, "STAGES": STAGES[head_dim], "num_warps": 4}
    return Launch(kernel, (len(lists[-1]) - 1,), args, constants)


def _vector(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Tensor descriptor for the copy engine: a contiguous tensor as a vector, and the blocks to copy."""
    return TensorDescriptor(x, [x.numel()], [1], block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype]))
