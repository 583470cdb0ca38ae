# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false
"""Forward attention over a schedule on Hopper in FP8, in Gluon.

Built like `hopper_attention`: a producer warp, and two warpgroups that alternate. Scores and values are products of
e4m3 numbers, sums are float32. Weights are at most 2 ** 8, so that e4m3 holds those down to 2 ** -17 of the largest.
"""

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foveate.kernels.block import round_inputs
from foveate.kernels.block.hopper_attention import HALF, ROWS, load_block, tile_of
from foveate.kernels.block.schedule import Schedule, WorkPartition
from foveate.kernels.launch import Launch, launcher

__all__ = ["CUT", "forward", "launch"]

STEP, STAGES = 128, 4
# the copy engine reads rows of values from multiples of 16 bytes, and values lie in runs of 16
CUT = {"rows": ROWS, "step": STEP, "short": STEP, "aligned": round_inputs.ALIGNED}  # arguments of `schedule`

ALIGNED = gl.constexpr(round_inputs.ALIGNED)
OFFSET = gl.constexpr(8.0)  # weights are 2 ** OFFSET at most


@gluon.jit
def _produce(
    d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_work, p_tiles, p_steps, begin, end, heads, queries, keys, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy queries, keys and values into buffers as these become free."""
    ring = 0
    for work in range(begin, end):
        batch, head, row, _, full, _, done = tile_of(p_work, p_tiles, work, heads)
        sample = batch * heads + head
        slot, turn = (work - begin) % 2, (work - begin) // 2
        mbarrier.wait(q_empty.index(slot), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * d_q.block_type.nbytes)
        for half in gl.static_range(2):
            q_row = sample * queries + row + half * HALF
            load_block(d_q, [q_row, 0], q_full.index(slot), b_q.index(2 * slot + half))
        for step in range(full, done):
            first = gl.load(p_steps + 2 * step) // ALIGNED * ALIGNED
            stage, phase = ring % STAGES, (ring // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), d_k.block_type.nbytes)
            load_block(d_k, [sample * keys + first, 0], k_full.index(stage), b_k.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), d_v.block_type.nbytes)
            load_block(d_v, [sample * D, first], v_full.index(stage), b_v.index(stage))
            ring += 1


@gluon.jit
def _masked(scores, p_steps, step, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores with -inf outside of the step."""
    first, end = gl.load(p_steps + 2 * step), gl.load(p_steps + 2 * step + 1)
    column = first // ALIGNED * ALIGNED + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    return gl.where(gl.expand_dims((first <= column) & (column < end), 0), scores, -float("inf"))


@gluon.jit
def _weights(p, BN: gl.constexpr, OUT: gl.constexpr):
    """Weights in e4m3 in the order in which `round_inputs` stores values: every thread keeps its own."""
    p = p.reshape((HALF, BN // 16, 2, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((HALF, BN))
    return gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=4)).to(gl.float8e4nv)


@gluon.jit
def _sum(acc, new, shrink, OUT: gl.constexpr):
    """Output with the product of one step added in float32: tensor cores add products of e4m3 with fewer bits."""
    return acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT)), 1) + new


@gluon.jit
def _attend(
    m, norm, p, acc, shrink, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring, turn, scale,
    WHO: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """One step of online softmax, overlapped with the product of the previous weights `p` and values."""
    stage, phase, before = ring % STAGES, (ring // STAGES) & 1, (ring - 1) % STAGES
    p = _weights(p, BN, OUT)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    scores = warpgroup_mma(q, b_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, b_v.index(before).permute((1, 0)), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WHO), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        scores = _masked(scores, p_steps, step, BN, SCORES)
    m_new = gl.maximum(m, gl.max(scores, 1) * scale - OFFSET)
    p = gl.exp2(scores * gl.expand_dims(scale, 1) - gl.expand_dims(m_new, 1))
    shrink_new = gl.exp2(m - m_new)
    norm = norm * shrink_new + gl.sum(p, 1)
    mbarrier.wait(v_full.index(stage), phase)  # here, because it keeps the compiler from waiting for `new` earlier
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    return m_new, norm, p, acc * gl.expand_dims(gl.convert_layout(shrink_new, gl.SliceLayout(1, OUT)), 1), shrink


@gluon.jit
def _consume(
    WHO: gl.constexpr, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    p_out, p_scale, p_scales, p_means, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale,
    s_ob, s_oh, s_o, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCATTER: gl.constexpr,
):  # fmt: skip
    """Output of one warpgroup's half of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    rows: gl.constexpr = gl.SliceLayout(1, OUT)
    ring, turn = 0, 0
    for work in range(begin, end):
        batch, head, row, row_end, full, short, done = tile_of(p_work, p_tiles, work, heads)
        sample = batch * heads + head
        slot = (work - begin) % 2
        q = b_q.index(2 * slot + WHO)
        o_s = row + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        q_scale = gl.load(p_scale + sample.to(gl.int64) * queries + o_s, mask=o_s < row_end, other=1.0)
        q_scale = q_scale * (gl.load(p_scales + 2 * sample) * scale)
        # first step: there are no values to multiply yet
        mbarrier.wait(q_full.index(slot), ((work - begin) // 2) & 1)
        mbarrier.wait(k_full.index(ring % STAGES), (ring // STAGES) & 1)
        zero = gl.zeros([HALF, BN], gl.float32, SCORES)
        scores = warpgroup_mma(q, b_k.index(ring % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(ring % STAGES), count=1)
        scores = _masked(scores, p_steps, full, BN, SCORES)
        m = gl.max(scores, 1) * q_scale - OFFSET
        p = gl.exp2(scores * gl.expand_dims(q_scale, 1) - gl.expand_dims(m, 1))
        norm = gl.sum(p, 1)
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        shrink = gl.full([HALF], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
        mbarrier.wait(v_full.index(ring % STAGES), (ring // STAGES) & 1)
        ring += 1
        middle = gl.maximum(short, full + 1)
        for step in range(full + 1, middle):
            m, norm, p, acc, shrink = _attend(
                m, norm, p, acc, shrink, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                turn, q_scale, WHO, D, BN, STAGES, SCORES, OUT, False,
            )  # fmt: skip
            ring += 1
            turn += 1
        for step in range(middle, done):
            m, norm, p, acc, shrink = _attend(
                m, norm, p, acc, shrink, q, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                turn, q_scale, WHO, D, BN, STAGES, SCORES, OUT, True,
            )  # fmt: skip
            ring += 1
            turn += 1
        mbarrier.arrive(q_empty.index(slot), count=1)
        # values of the last step
        before = (ring - 1) % STAGES
        acc = warpgroup_mma(_weights(p, BN, OUT), b_v.index(before).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        o_m = row + WHO * HALF + gl.arange(0, HALF, rows)
        o_d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        factor = gl.load(p_scales + 2 * sample + 1) / gl.convert_layout(norm, rows)
        mean = gl.load(p_means + (2 * sample + 1) * D + o_d)
        out = acc * gl.expand_dims(factor, 1) + gl.expand_dims(mean, 0)
        place = gl.load(p_place + o_m, mask=o_m < row_end, other=0) if SCATTER else o_m
        p_o = p_out + batch.to(gl.int64) * s_ob + head.to(gl.int64) * s_oh
        p_o = p_o + gl.expand_dims(place.to(gl.int64) * s_o, 1) + gl.expand_dims(o_d, 0)
        gl.store(p_o, out.to(p_out.dtype.element_ty), mask=gl.expand_dims(o_m < row_end, 1))


@gluon.jit
def forward(
    d_q, d_k, d_v, p_out, p_scale, p_scales, p_means, p_place, p_tiles, p_steps, p_work, p_bounds, scale,
    heads, queries, keys, s_ob, s_oh, s_o,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCATTER: gl.constexpr,
):  # fmt: skip
    """Output of the tiles of this program."""
    begin, end = gl.load(p_bounds + gl.program_id(0)), gl.load(p_bounds + gl.program_id(0) + 1)
    b_q = gl.allocate_shared_memory(d_q.dtype, [4, HALF, D], d_q.layout)
    b_k = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, D], d_k.layout)
    b_v = gl.allocate_shared_memory(d_v.dtype, [STAGES, D, BN], d_v.layout)
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
            p_out, p_scale, p_scales, p_means, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale,
            s_ob, s_oh, s_o, D, BN, STAGES, SCATTER,
        )),
        (_consume, (
            1, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            p_out, p_scale, p_scales, p_means, p_place, p_work, p_tiles, p_steps, begin, end, heads, queries, scale,
            s_ob, s_oh, s_o, D, BN, STAGES, SCATTER,
        )),
        (_produce, (
            d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            p_work, p_tiles, p_steps, begin, end, heads, queries, keys, D, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


# --- launch ----------------------------------------------------------------------------------------------------------


def launch(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, scales: Tensor, means: Tensor, out: Tensor,
    plan: Schedule, work: WorkPartition, scale: float, scatter: Tensor | None = None,
) -> None:  # fmt: skip
    """Write `out` of every query that has keys to read.

    Args:
        q: As all other inputs, of `round_inputs.Rounded`.
        k: Keys.
        v: Values.
        q_scale: Scale of each query.
        scales: Scales of keys and values.
        means: Means of keys and values.
        out: Output [batch, heads, queries, head_dim].
        plan: Schedule of the table, made with `CUT`.
        work: Tiles of each program.
        scale: Factor on q·k, above 0.
        scatter: Position of each query in `out`. Without it, queries keep their places.
    """
    _launch(q, k, v, q_scale, scales, means, out, scatter, plan.tiles, plan.steps, *work, scale)


@launcher
def _launch(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, scales: Tensor, means: Tensor, out: Tensor,
    scatter: Tensor | None, tiles: Tensor, steps: Tensor, items: Tensor, bounds: Tensor, scale: float,
) -> Launch:  # fmt: skip
    heads, queries, head_dim = q.shape[1:]
    blocks = [ROWS // 2, head_dim], [STEP, head_dim], [head_dim, STEP]
    args = (
        *(_descriptor(x, block) for x, block in zip((q, k, v), blocks, strict=True)),
        out, q_scale, scales, means, scales if scatter is None else scatter, tiles, steps, items, bounds,
        scale / math.log(2), heads, queries, k.shape[2], *out.stride()[:3],
    )  # fmt: skip
    constants = {"D": head_dim, "BN": STEP, "STAGES": STAGES, "SCATTER": scatter is not None, "num_warps": 4}
    return Launch(forward, (len(bounds) - 1,), args, constants)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """The copy engine's description of a contiguous tensor as a matrix of its last dimension, and of blocks of it."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor(x, [x.numel() // x.shape[3], x.shape[3]], [x.shape[3], 1], block, layout)
