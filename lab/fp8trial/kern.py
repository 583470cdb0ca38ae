from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
LN2 = gl.constexpr(0.6931471805599453)
HALF = gl.constexpr(64)
OFFSET = gl.constexpr(8.0)
ALIGNED = gl.constexpr(64)


@gluon.jit
def tile_of(p_work, p_tiles, work, heads):
    tile, sample = gl.load(p_work + 2 * work), gl.load(p_work + 2 * work + 1)
    p_tile = p_tiles + 5 * tile
    return (
        sample // heads, sample % heads, gl.load(p_tile), gl.load(p_tile + 1),
        gl.load(p_tile + 2), gl.load(p_tile + 3), gl.load(p_tile + 4),
    )


@gluon.jit
def _produce(
    d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_work, p_tiles, p_steps, begin, end, heads, queries, keys, STAGES: gl.constexpr, D: gl.constexpr,
):
    ring = 0
    for work in range(begin, end):
        batch, head, row, _, full, _, done = tile_of(p_work, p_tiles, work, heads)
        sample = batch * heads + head
        slot, turn = (work - begin) % 2, (work - begin) // 2
        mbarrier.wait(q_empty.index(slot), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * d_q.block_type.nbytes)
        q_row = sample * queries + row
        for half in gl.static_range(2):
            load_block(d_q, [q_row + half * HALF, 0], q_full.index(slot), b_q.index(2 * slot + half))
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
    first, end = gl.load(p_steps + 2 * step), gl.load(p_steps + 2 * step + 1)
    column = first // ALIGNED * ALIGNED + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    return gl.where(gl.expand_dims((column >= first) & (column < end), 0), scores, -float("inf"))


@gluon.jit
def _weights(p, BN: gl.constexpr, OUT: gl.constexpr, PERMUTED: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=4)
    if PERMUTED:
        p = p.reshape([HALF, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([HALF, BN])
        return gl.convert_layout(p, layout).to(gl.float8e4nv)
    else:
        return gl.convert_layout(p.to(gl.float8e4nv), layout)


@gluon.jit
def _scores(q, b_k, k_full, k_empty, ring, STAGES: gl.constexpr, BN: gl.constexpr, SCORES: gl.constexpr):
    zero = gl.zeros([HALF, BN], gl.float32, SCORES)
    return warpgroup_mma(q, b_k.index(ring % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _step_overlap(
    m, norm, x, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring, turn,
    WHO: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    MASK: gl.constexpr, PERMUTED: gl.constexpr, PING: gl.constexpr,
):
    stage, phase = ring % STAGES, (ring // STAGES) & 1
    before, before_phase = (ring - 1) % STAGES, ((ring - 1) // STAGES) & 1
    p = _weights(x, BN, OUT, PERMUTED)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), before_phase)
    if PING:
        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
    scores = _scores(q, b_k, k_full, k_empty, ring, STAGES, BN, SCORES)
    acc = warpgroup_mma(p, b_v.index(before).permute((1, 0)), acc, is_async=True)
    if PING:
        mbarrier.arrive(turns.index(1 - WHO), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        scores = _masked(scores, p_steps, step, BN, SCORES)
    m_new = gl.maximum(m, gl.max(scores, 1) * sc - OFFSET)
    x = gl.exp2(scores * gl.expand_dims(sc, 1) - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    norm = norm * shrink + gl.sum(x, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT)), 1)
    return m_new, norm, x, acc


@gluon.jit
def _step_plain(
    m, norm, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring, turn,
    WHO: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    MASK: gl.constexpr, PERMUTED: gl.constexpr, PING: gl.constexpr,
):
    stage, phase = ring % STAGES, (ring // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    if PING:
        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
    scores = _scores(q, b_k, k_full, k_empty, ring, STAGES, BN, SCORES)
    if PING == 1:
        mbarrier.arrive(turns.index(1 - WHO), count=1)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    if PING == 2:
        mbarrier.arrive(turns.index(1 - WHO), count=1)
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        scores = _masked(scores, p_steps, step, BN, SCORES)
    m_new = gl.maximum(m, gl.max(scores, 1) * sc - OFFSET)
    x = gl.exp2(scores * gl.expand_dims(sc, 1) - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    norm = norm * shrink + gl.sum(x, 1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OUT)), 1)
    p = _weights(x, BN, OUT, PERMUTED)
    mbarrier.wait(v_full.index(stage), phase)
    acc = warpgroup_mma(p, b_v.index(stage).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m_new, norm, acc


@gluon.jit
def _consume(
    WHO: gl.constexpr, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    p_out, p_lse, p_qs, p_scale, p_mean, p_work, p_tiles, p_steps, begin, end, heads, queries, s_ob, s_oh, s_o,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, PERMUTED: gl.constexpr,
    PING: gl.constexpr, QREG: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    rows: gl.constexpr = gl.SliceLayout(1, OUT)
    s_rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    ring, turn = 0, 0
    for work in range(begin, end):
        batch, head, row, row_end, full, short, done = tile_of(p_work, p_tiles, work, heads)
        sample = batch * heads + head
        slot = (work - begin) % 2
        o_s = row + WHO * HALF + gl.arange(0, HALF, s_rows)
        sc = gl.load(p_qs + sample * queries + o_s, mask=o_s < row_end, other=1.0) * gl.load(p_scale + 2 * sample)
        mbarrier.wait(q_full.index(slot), ((work - begin) // 2) & 1)
        if QREG:
            q = b_q.index(2 * slot + WHO).load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=4))
        else:
            q = b_q.index(2 * slot + WHO)
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        if OVERLAP:
            mbarrier.wait(k_full.index(ring % STAGES), (ring // STAGES) & 1)
            scores = _scores(q, b_k, k_full, k_empty, ring, STAGES, BN, SCORES)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(ring % STAGES), count=1)
            scores = _masked(scores, p_steps, full, BN, SCORES)
            m = gl.max(scores, 1) * sc - OFFSET
            x = gl.exp2(scores * gl.expand_dims(sc, 1) - gl.expand_dims(m, 1))
            norm = gl.sum(x, 1)
            ring += 1
            middle = gl.maximum(short, full + 1)
            for step in range(full + 1, middle):
                m, norm, x, acc = _step_overlap(
                    m, norm, x, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                    turn, WHO, BN, STAGES, SCORES, OUT, False, PERMUTED, PING,
                )
                ring += 1
                turn += 1
            for step in range(middle, done):
                m, norm, x, acc = _step_overlap(
                    m, norm, x, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                    turn, WHO, BN, STAGES, SCORES, OUT, True, PERMUTED, PING,
                )
                ring += 1
                turn += 1
            mbarrier.arrive(q_empty.index(slot), count=1)
            before, before_phase = (ring - 1) % STAGES, ((ring - 1) // STAGES) & 1
            p = _weights(x, BN, OUT, PERMUTED)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = warpgroup_mma(p, b_v.index(before).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(before), count=1)
        else:
            m = gl.full([HALF], -float("inf"), gl.float32, s_rows)
            norm = gl.zeros([HALF], gl.float32, s_rows)
            for step in range(full, short):
                m, norm, acc = _step_plain(
                    m, norm, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                    turn, WHO, BN, STAGES, SCORES, OUT, False, PERMUTED, PING,
                )
                ring += 1
                turn += 1
            for step in range(short, done):
                m, norm, acc = _step_plain(
                    m, norm, acc, q, sc, b_k, b_v, k_full, k_empty, v_full, v_empty, turns, p_steps, step, ring,
                    turn, WHO, BN, STAGES, SCORES, OUT, True, PERMUTED, PING,
                )
                ring += 1
                turn += 1
            mbarrier.arrive(q_empty.index(slot), count=1)
        lse = gl.convert_layout((m + gl.log2(norm)) * LN2, rows)
        share = gl.load(p_scale + 2 * sample + 1) / gl.convert_layout(norm, rows)
        o_m = row + WHO * HALF + gl.arange(0, HALF, rows)
        o_d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        mean = gl.load(p_mean + (2 * sample + 1) * D + o_d)
        out = acc * gl.expand_dims(share, 1) + gl.expand_dims(mean, 0)
        gl.store(p_lse + sample * queries + o_m, lse, mask=o_m < row_end)
        p_o = p_out + batch.to(gl.int64) * s_ob + head.to(gl.int64) * s_oh
        p_o = p_o + gl.expand_dims(o_m.to(gl.int64) * s_o, 1) + gl.expand_dims(o_d, 0)
        gl.store(p_o, out.to(gl.bfloat16), mask=gl.expand_dims(o_m < row_end, 1))


@gluon.jit
def forward(
    d_q, d_k, d_v, p_out, p_lse, p_qs, p_scale, p_mean, p_tiles, p_steps, p_work, p_bounds, heads, queries, keys,
    s_ob, s_oh, s_o,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, PERMUTED: gl.constexpr,
    PING: gl.constexpr, QREG: gl.constexpr,
):
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
            p_out, p_lse, p_qs, p_scale, p_mean, p_work, p_tiles, p_steps, begin, end, heads, queries, s_ob, s_oh, s_o,
            D, BN, STAGES, OVERLAP, PERMUTED, PING, QREG,
        )),
        (_consume, (
            1, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            p_out, p_lse, p_qs, p_scale, p_mean, p_work, p_tiles, p_steps, begin, end, heads, queries, s_ob, s_oh, s_o,
            D, BN, STAGES, OVERLAP, PERMUTED, PING, QREG,
        )),
        (_produce, (
            d_q, d_k, d_v, b_q, b_k, b_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            p_work, p_tiles, p_steps, begin, end, heads, queries, keys, STAGES, D,
        )),
    ], [4, 1], [240, 24])
