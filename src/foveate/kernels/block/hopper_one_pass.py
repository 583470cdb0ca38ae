# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false
"""Gradients of attention in one pass on Hopper, in Gluon.

Persistent programs, one per multiprocessor, each work through a list of tiles of 128 keys, and through the cells of
queries that read each tile. A producer warp fills buffers. Two consumer warpgroups own 64 keys each: they keep the
gradients of their keys and values in registers, share the gradients of the scores, and compute half of the gradient of
the queries each, which they add to sums in float32 in global memory.

Sums are added to in the order of `Turns`, so results are deterministic: a warp waits until a cell is at its turn, and
another tells the next program when the sums are added.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foveate.kernels.block.hopper_attention import DTYPES, HALF, ROWS, descriptor, load_block, matrix_of
from foveate.kernels.block.schedule import Turns
from foveate.kernels.launch import Launch, launcher

__all__ = ["ALIGNED", "CUT", "STEP", "backward", "finish", "launch"]

STEP = {64: 128, 128: 64}  # queries of a cell: the sums of a cell have 64 * 128 numbers
STAGES = {64: 2, 128: 2}
ALIGNED = 4  # the copy engine reads float32 vectors from multiples of 4
CUT = {"rows": ROWS, "aligned": ALIGNED}  # arguments of `take_turns`
LOG2E = gl.constexpr(1.4426950408889634)
PART = gl.constexpr(64 * 64)  # sums of a cell that one warpgroup computes
AHEAD = gl.constexpr(4)  # visits whose turns are known ahead

ADD = gl.constexpr("""{
    .reg .pred first;
    .reg .u64 place;
    setp.eq.s32 first, $16, 0;
    cvt.u64.u32 place, $8;
    add.u64 place, place, $4;
    @first st.global.v4.f32 [place], {$12, $13, $14, $15};
    @!first red.relaxed.gpu.global.add.v4.f32 [place], {$12, $13, $14, $15};
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")
AWAIT = gl.constexpr("""{
    .reg .pred early;
    again:
    ld.acquire.gpu.global.u32 $0, [$1];
    setp.ne.u32 early, $0, $2;
    @early bra again;
}""")
END = gl.constexpr("""{
    .reg .pred first;
    .reg .u32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    @first red.release.gpu.global.add.u32 [$1], 1;
    mov.b32 $0, 0;
}""")


@gluon.jit
def _await_turn(p_turn, rank):
    """Wait until `rank` visits have ended, and see what they added."""
    gl.inline_asm_elementwise(AWAIT, "=r,l,r", [p_turn.to(gl.int64), rank], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _end_turn(p_turn):
    """Count a visit as ended, for those who see all that the visit added."""
    gl.inline_asm_elementwise(END, "=r,l", [p_turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(p_sums, x, rank, SUMS: gl.constexpr):
    """Store the first summand or add to the sums [64, 64].

    In memory, the elements (0, 0), (0, 1), (8, 0) and (8, 1) of 16 x 8 numbers are neighbours. A thread holds these in
    registers that follow each other.
    """
    m, n = gl.arange(0, 64, gl.SliceLayout(1, SUMS)), gl.arange(0, 64, gl.SliceLayout(0, SUMS))
    place = gl.expand_dims(m // 16 * 128 + m % 8 * 16, 1) + gl.expand_dims(n % 8 // 2 * 4, 0)
    args = [(p_sums + place).to(gl.int64), gl.expand_dims(n // 8 * 2048, 0), x, rank]
    constraints: gl.constexpr = "=r,=r,=r,=r,l,l,l,l,r,r,r,r,f,f,f,f,r,r,r,r"
    gl.inline_asm_elementwise(ADD, constraints, args, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _item(p_work, p_tiles, work, heads):
    """Batch, head, first row, end row, first visit and end visit of a work item."""
    p_item = p_work + 4 * work
    tile, sample = gl.load(p_item), gl.load(p_item + 1)
    p_tile = p_tiles + 2 * tile
    return (
        sample // heads, sample % heads, gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_item + 2), gl.load(p_item + 3)
    )  # fmt: skip


@gluon.jit
def _produce(
    d_k, d_v, d_q, d_g, d_lse, d_delta, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty,
    p_work, p_tiles, p_visits, begin, end, heads, queries,
    k_batch, k_head, k_column, v_batch, v_head, v_column, q_batch, q_head, q_column, g_batch, g_head, g_column,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy keys and values once per tile; queries, output gradients, LSE and delta once per visit."""
    ring = 0
    for work in range(begin, end):
        batch, head, row, _, first, done = _item(p_work, p_tiles, work, heads)
        slot, turn = (work - begin) % 2, (work - begin) // 2
        mbarrier.wait(tile_empty.index(slot), (turn & 1) ^ 1)
        mbarrier.expect(tile_full.index(slot), 2 * d_k.block_type.nbytes + 2 * d_v.block_type.nbytes)
        k_row, v_row = batch * k_batch + head * k_head + row, batch * v_batch + head * v_head + row
        for half in gl.static_range(2):
            part = 2 * slot + half
            load_block(d_k, [k_row + half * HALF, head * k_column], tile_full.index(slot), b_k.index(part))
            load_block(d_v, [v_row + half * HALF, head * v_column], tile_full.index(slot), b_v.index(part))
        q_row, g_row = batch * q_batch + head * q_head, batch * g_batch + head * g_head
        sample = (batch * heads + head) * queries
        for visit in range(first, done):
            base = gl.load(p_visits + 4 * visit)
            stage, phase = ring % STAGES, (ring // STAGES) & 1
            size: gl.constexpr = d_q.block_type.nbytes + d_g.block_type.nbytes
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), size + d_lse.block_type.nbytes + d_delta.block_type.nbytes)
            load_block(d_q, [q_row + base, head * q_column], full.index(stage), b_q.index(stage))
            load_block(d_lse, [sample + base], full.index(stage), b_lse.index(stage))
            load_block(d_g, [g_row + base, head * g_column], full.index(stage), b_g.index(stage))
            load_block(d_delta, [sample + base], full.index(stage), b_delta.index(stage))
            ring += 1


@gluon.jit
def _await_turns(granted, ended, p_work, p_visits, p_counts, begin, end):
    """Grant each visit when it is its turn."""
    ring = 0
    for work in range(begin, end):
        for visit in range(gl.load(p_work + 4 * work + 2), gl.load(p_work + 4 * work + 3)):
            place, rank = gl.load(p_visits + 4 * visit + 2), gl.load(p_visits + 4 * visit + 3)
            slot, phase = ring % AHEAD, (ring // AHEAD) & 1
            mbarrier.wait(ended.index(slot), phase ^ 1)
            _await_turn(p_counts + place, rank)
            mbarrier.arrive(granted.index(slot), count=1)
            ring += 1


@gluon.jit
def _end_turns(added, ended, p_work, p_visits, p_counts, begin, end):
    """Count each visit as ended when both warpgroups have added to the sums."""
    ring = 0
    for work in range(begin, end):
        for visit in range(gl.load(p_work + 4 * work + 2), gl.load(p_work + 4 * work + 3)):
            place = gl.load(p_visits + 4 * visit + 2)
            slot, phase = ring % AHEAD, (ring // AHEAD) & 1
            mbarrier.wait(added.index(slot), phase)
            _end_turn(p_counts + place)
            mbarrier.arrive(ended.index(slot), count=1)
            ring += 1


@gluon.jit
def _store(p_x, x, rows_end, batch, head, row, s_b, s_h, s_n, D: gl.constexpr, dtype: gl.constexpr, OUT: gl.constexpr):
    o_m = row + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    p_m = p_x + batch.to(gl.int64) * s_b + head.to(gl.int64) * s_h + gl.expand_dims(o_m.to(gl.int64) * s_n, 1)
    p_m = p_m + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OUT)), 0)
    gl.store(p_m, x.to(dtype), mask=gl.expand_dims(o_m < rows_end, 1))


@gluon.jit
def _consume(
    WHO: gl.constexpr, b_k, b_v, b_q, b_g, b_lse, b_delta, b_ds, tile_full, tile_empty, full, empty, turns, shared,
    granted, added, p_dk, p_dv, p_sums, p_work, p_tiles, p_visits, begin, end, heads, scale, factor,
    k_b, k_h, k_n, v_b, v_h, v_n, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of one warpgroup's half of each tile of keys and values, and half of each summand of the queries'."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = b_q.dtype
    column = gl.arange(0, BN, COLUMNS)
    ring = 0
    p_visit = p_visits + 4 * gl.load(p_work + 4 * begin + 2, mask=begin < end, other=0)
    span, place, rank = gl.load(p_visit + 1), gl.load(p_visit + 2), gl.load(p_visit + 3)
    for work in range(begin, end):
        batch, head, row, row_end, first, done = _item(p_work, p_tiles, work, heads)
        slot = (work - begin) % 2
        o_m = row + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        real = gl.expand_dims(o_m < row_end, 1)
        k, v = b_k.index(2 * slot + WHO), b_v.index(2 * slot + WHO)
        k_0, k_1 = b_k.index(2 * slot), b_k.index(2 * slot + 1)
        if D == 128:  # this warpgroup's columns of the queries' gradient
            k_0, k_1 = k_0.slice(64 * WHO, 64, 1), k_1.slice(64 * WHO, 64, 1)
        dk = warpgroup_mma_init(gl.zeros([HALF, D], gl.float32, OUT))
        dv = gl.zeros([HALF, D], gl.float32, OUT)
        mbarrier.wait(tile_full.index(slot), ((work - begin) // 2) & 1)
        for visit in range(first, done):
            stage = ring % STAGES
            q, g = b_q.index(stage), b_g.index(stage)
            zero = gl.zeros([HALF, BN], gl.float32, SCORES)
            mbarrier.wait(full.index(stage), (ring // STAGES) & 1)
            mbarrier.wait(turns.index(WHO), (ring & 1) ^ (1 - WHO))
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - WHO), count=1)
            p_next = p_visits + 4 * (visit + 1)
            next_span, next_place, next_rank = gl.load(p_next + 1), gl.load(p_next + 2), gl.load(p_next + 3)
            s, dk = warpgroup_mma_wait(1, deps=(s, dk))
            mbarrier.arrive(empty.index((ring - 1) % STAGES), count=1, pred=visit > first)
            inside = (span % 256 <= column) & (column < span // 256)  # others have no weight
            lse = gl.where(inside, b_lse.index(stage).load(COLUMNS) * LOG2E, float("inf"))
            p = gl.where(real, gl.exp2(s * scale - gl.expand_dims(lse, 0)), 0.0)
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), g, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = (p * (dp - gl.expand_dims(b_delta.index(stage).load(COLUMNS), 0))).to(dtype)
            half = 2 * (ring % 2)
            b_ds.index(half + WHO).store(ds)
            fence_async_shared()
            mbarrier.arrive(shared.index(ring % 2), count=1)
            mbarrier.wait(shared.index(ring % 2), (ring // 2) & 1)
            ds_0, ds_1 = b_ds.index(half), b_ds.index(half + 1)
            if D == 64:  # this warpgroup's rows of the queries' gradient
                ds_0, ds_1 = ds_0.slice(64 * WHO, 64, 1), ds_1.slice(64 * WHO, 64, 1)
            none = gl.zeros([64, 64], gl.float32, SUMS)
            dq = warpgroup_mma(ds_0.permute((1, 0)), k_0, none, use_acc=False, is_async=True)
            dq = warpgroup_mma(ds_1.permute((1, 0)), k_1, dq, is_async=True)
            dk = warpgroup_mma(b_ds.index(half + WHO), q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            mbarrier.wait(granted.index(ring % AHEAD), (ring // AHEAD) & 1)
            _add(p_sums + place.to(gl.int64) * (2 * PART) + WHO * PART, dq, rank, SUMS)
            mbarrier.arrive(added.index(ring % AHEAD), count=1)
            span, place, rank = next_span, next_place, next_rank
            ring += 1
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(empty.index((ring - 1) % STAGES), count=1)
        mbarrier.arrive(tile_empty.index(slot), count=1)
        _store(p_dk, dk * factor, row_end, batch, head, row + WHO * HALF, k_b, k_h, k_n, D, dtype, OUT)
        _store(p_dv, dv, row_end, batch, head, row + WHO * HALF, v_b, v_h, v_n, D, dtype, OUT)


@gluon.jit
def _barriers(SIZE: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def backward(
    d_k, d_v, d_q, d_g, d_lse, d_delta, p_dk, p_dv, p_sums, p_counts, p_tiles, p_visits, p_work, p_bounds,
    scale, factor, heads, queries,
    k_batch, k_head, k_column, v_batch, v_head, v_column, q_batch, q_head, q_column, g_batch, g_head, g_column,
    k_b, k_h, k_n, v_b, v_h, v_n, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, and sums that are the gradient of the queries."""
    begin, end = gl.load(p_bounds + gl.program_id(0)), gl.load(p_bounds + gl.program_id(0) + 1)
    b_k = gl.allocate_shared_memory(d_k.dtype, [4, HALF, D], d_k.layout)
    b_v = gl.allocate_shared_memory(d_k.dtype, [4, HALF, D], d_k.layout)
    b_q = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_q.layout)
    b_g = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_q.layout)
    b_ds = gl.allocate_shared_memory(
        d_k.dtype, [4, HALF, BN], gl.NVMMASharedLayout.get_default_for([HALF, BN], d_k.dtype)
    )
    b_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BN], d_lse.layout)
    b_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BN], d_lse.layout)
    tile_full, tile_empty = _barriers(2, 1), _barriers(2, 2)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    turns, shared = _barriers(2, 1), _barriers(2, 2)
    granted, added, ended = _barriers(AHEAD, 1), _barriers(AHEAD, 2), _barriers(AHEAD, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, b_k, b_v, b_q, b_g, b_lse, b_delta, b_ds, tile_full, tile_empty, full, empty, turns, shared,
            granted, added, p_dk, p_dv, p_sums, p_work, p_tiles, p_visits, begin, end, heads, scale, factor,
            k_b, k_h, k_n, v_b, v_h, v_n, D, BN, STAGES,
        )),
        (_consume, (
            1, b_k, b_v, b_q, b_g, b_lse, b_delta, b_ds, tile_full, tile_empty, full, empty, turns, shared,
            granted, added, p_dk, p_dv, p_sums, p_work, p_tiles, p_visits, begin, end, heads, scale, factor,
            k_b, k_h, k_n, v_b, v_h, v_n, D, BN, STAGES,
        )),
        (_produce, (
            d_k, d_v, d_q, d_g, d_lse, d_delta, b_k, b_v, b_q, b_g, b_lse, b_delta, tile_full, tile_empty, full, empty,
            p_work, p_tiles, p_visits, begin, end, heads, queries, k_batch, k_head, k_column,
            v_batch, v_head, v_column, q_batch, q_head, q_column, g_batch, g_head, g_column, STAGES,
        )),
        (_await_turns, (granted, ended, p_work, p_visits, p_counts, begin, end)),
        (_end_turns, (added, ended, p_work, p_visits, p_counts, begin, end)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


@triton.jit
def finish(
    p_sums, p_counts, p_dq, p_cells, factor, heads, cells, s_b, s_h, s_n, D: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Gradient of the queries of one cell from their sums, in the order of `_add`; zero if nothing was added."""
    cell, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, end = tl.load(p_cells + 2 * cell), tl.load(p_cells + 2 * cell + 1)
    m, n = tl.arange(0, BN)[:, None], tl.arange(0, D)[None, :]
    row = first // 4 * 4 + m
    inside = (first <= row) & (row < end) & (n < D)
    at = m // 64 * 4096 + m % 64 // 16 * 128 + m % 8 * 16 + m % 16 // 8 * 2
    at += n // 64 * 4096 + n % 64 // 8 * 512 + n % 8 // 2 * 4 + n % 2
    place = sample * cells + cell
    added = inside & (row < tl.where(tl.load(p_counts + place) > 0, end, first))
    dq = tl.load(p_sums + place * 8192 + at, mask=added, other=0.0) * factor
    p_dq = p_dq + sample // heads * s_b + sample % heads * s_h + row.to(tl.int64) * s_n + n
    tl.store(p_dq, dq.to(p_dq.dtype.element_ty), mask=inside)


# --- launch ----------------------------------------------------------------------------------------------------------


def launch(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, plan: Turns, scale: float,
) -> None:  # fmt: skip
    """Write `dq` of every query, and `dk` and `dv` of every key that queries read.

    Args:
        q: Queries [batch, heads, queries, D]; q, k, v and grad_out must be `hopper_attention.addressable`.
        k: Keys.
        v: Values.
        grad_out: Gradient of the output.
        lse: Per-query log-sum-exp, contiguous float32 [batch, heads, queries].
        delta: sum(out * grad_out) less the gradient of the LSE, shaped like lse.
        dq: Gradient of the queries, shaped like q.
        dk: Gradient of the keys.
        dv: Gradient of the values.
        plan: Turns of the transposed table, made with `CUT` and `STEP`, with a program per multiprocessor.
        scale: Factor on q·k.
    """
    if beyond := -q.shape[2] % ALIGNED:
        lse, delta = pad(lse, (0, beyond)), pad(delta, (0, beyond))
    sums = q.new_empty((q.shape[0] * q.shape[1], len(plan.cells), 64 * 128), dtype=torch.float32)
    counts = q.new_zeros(sums.shape[:2], dtype=torch.int32)
    lists = plan.tiles, plan.visits, plan.items, plan.bounds
    _launch(k, v, q, grad_out, lse, delta, dk, dv, sums, counts, *lists, scale)
    _launch_finish(sums, counts, dq, plan.cells, scale)


@launcher
def _launch(
    k: Tensor, v: Tensor, q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    sums: Tensor, counts: Tensor, tiles: Tensor, visits: Tensor, items: Tensor, bounds: Tensor, scale: float,
) -> Launch:  # fmt: skip
    head_dim, heads = q.shape[3], q.shape[1]
    step = STEP[head_dim]
    matrices = [matrix_of(x) for x in (k, v, q, grad_out)]
    blocks = [64, head_dim], [64, head_dim], [step, head_dim], [step, head_dim]
    args = (
        *(descriptor(x, *rest) for x, *rest in zip((k, v, q, grad_out), matrices, blocks, strict=True)),
        *(_vector(x, [step]) for x in (lse, delta)), dk, dv, sums, counts, tiles, visits, items, bounds,
        scale / math.log(2), scale, heads, lse.shape[2],
        *(number for x in matrices for number in x[3:]),
        *(stride for x in (dk, dv) for stride in x.stride()[:3]),
    )  # fmt: skip
    constants = {"D": head_dim, "BN": step, "STAGES": STAGES[head_dim], "num_warps": 4}
    constants["launch_cooperative_grid"] = True  # programs wait for each other: all must run at the same time
    return Launch(backward, (len(bounds) - 1,), args, constants)


@launcher
def _launch_finish(sums: Tensor, counts: Tensor, dq: Tensor, cells: Tensor, scale: float) -> Launch:
    args = sums, counts, dq, cells, scale, dq.shape[1], len(cells), *dq.stride()[:3]
    constants = {"D": dq.shape[3], "BN": STEP[dq.shape[3]], "num_warps": 4}
    return Launch(finish, (len(cells), dq.shape[0] * dq.shape[1]), args, constants)


def _vector(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Tensor descriptor for the copy engine: a contiguous tensor as a vector, and the blocks to copy."""
    return TensorDescriptor(x, [x.numel()], [1], block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype]))
