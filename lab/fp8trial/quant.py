import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
MARGIN = tl.constexpr(4.0)


@triton.jit
def _rows(p, row, stride, n, end, D: tl.constexpr):
    return tl.load(p + row[:, None].to(tl.int64) * stride + tl.arange(0, D)[None, :], mask=(row < end)[:, None], other=0.0)


@triton.jit
def _guess(p, stride, keys, D: tl.constexpr, SAMPLES: tl.constexpr):
    """Mean of some keys and the range that is expected of all keys around it."""
    row = (tl.arange(0, SAMPLES).to(tl.int64) * keys // SAMPLES).to(tl.int32)
    some = _rows(p, row, stride, SAMPLES, keys, D).to(tl.float32)
    mean = tl.sum(some, 0) / SAMPLES
    return mean, tl.max(tl.max(tl.abs(some - mean[None, :]), 1), 0) * MARGIN


@triton.jit
def _q(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_q, o_q, p_qs, s_qb, s_qh, s_q, D: tl.constexpr, BT: tl.constexpr, SAMPLES: tl.constexpr):
    o_t, o_d = tile * BT + tl.arange(0, BT), tl.arange(0, D)
    x = _rows(p_q + batch * s_qb + head * s_qh, o_t, s_q, BT, queries, D).to(tl.float32)
    most = tl.max(tl.abs(x), 1)
    most = tl.where(most > 0, most, 1.0)
    x = x * (LARGEST / most)[:, None]
    row = sample.to(tl.int64) * queries + o_t
    tl.store(p_qs + row, most * (factor / LARGEST), mask=o_t < queries)
    tl.store(o_q + row[:, None] * D + o_d[None, :], x.to(tl.float8e4nv), mask=(o_t < queries)[:, None])


@triton.jit
def _k(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_k, o_k, s_kb, s_kh, s_k, D: tl.constexpr, BT: tl.constexpr, SAMPLES: tl.constexpr):
    o_t, o_d = tile * BT + tl.arange(0, BT), tl.arange(0, D)
    p = p_k + batch * s_kb + head * s_kh
    mean, limit = _guess(p, s_k, keys, D, SAMPLES)
    x = _rows(p, o_t, s_k, BT, keys, D).to(tl.float32) - mean[None, :]
    x = tl.where((o_t < keys)[:, None], x, 0.0)
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(p_part + (2 * sample) * tiles + tile, most)
    if tile == 0:
        tl.store(p_mean + (2 * sample) * D + o_d, mean)
    x = x * (LARGEST / tl.where(limit > 0, limit, 1.0))
    row = sample.to(tl.int64) * keys + o_t
    tl.store(o_k + row[:, None] * D + o_d[None, :], x.to(tl.float8e4nv), mask=(o_t < keys)[:, None])


@triton.jit
def _v(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_v, o_v, s_vb, s_vh, s_v, D: tl.constexpr, BT: tl.constexpr, SAMPLES: tl.constexpr):
    o_t, o_d = tile * BT + tl.arange(0, BT), tl.arange(0, D)
    p = p_v + batch * s_vb + head * s_vh
    mean, limit = _guess(p, s_v, keys, D, SAMPLES)
    o_p = o_t - o_t % 16 + (o_t // 2 % 2) * 8 + (o_t // 4 % 4) * 2 + o_t % 2  # key at each position
    x = _rows(p, o_p, s_v, BT, keys, D).to(tl.float32) - mean[None, :]
    x = tl.where((o_p < keys)[:, None], x, 0.0)
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(p_part + (2 * sample + 1) * tiles + tile, most)
    if tile == 0:
        tl.store(p_mean + (2 * sample + 1) * D + o_d, mean)
    x = x * (LARGEST / tl.where(limit > 0, limit, 1.0))
    column = sample.to(tl.int64) * D + o_d
    tl.store(o_v + column[:, None] * padded + o_t[None, :], tl.trans(x.to(tl.float8e4nv)), mask=(o_t < padded)[None, :])


@triton.jit
def quantise(
    p_q, p_k, p_v, o_q, o_k, o_v, p_qs, p_part, p_mean, heads, queries, keys, padded, tiles, factor,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v,
    D: tl.constexpr, BT: tl.constexpr, SAMPLES: tl.constexpr,
):
    tile, sample, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    if which == 0:
        _q(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_q, o_q, p_qs, s_qb, s_qh, s_q, D, BT, SAMPLES)
    elif which == 1:
        _k(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_k, o_k, s_kb, s_kh, s_k, D, BT, SAMPLES)
    else:
        _v(tile, sample, batch, head, queries, keys, padded, tiles, factor, p_part, p_mean, p_v, o_v, s_vb, s_vh, s_v, D, BT, SAMPLES)


@triton.jit
def settle(
    p_k, p_v, o_k, o_v, p_part, p_mean, p_scale, heads, keys, padded, tiles,
    s_kb, s_kh, s_k, s_vb, s_vh, s_v,
    D: tl.constexpr, BT: tl.constexpr, SAMPLES: tl.constexpr, BR: tl.constexpr, PROGRAMS: tl.constexpr,
):
    """Scales of the heads; those that exceeded their guess are quantised again."""
    program, sample, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (sample // heads).to(tl.int64), (sample % heads).to(tl.int64)
    o_r, o_d = tl.arange(0, BR), tl.arange(0, D)
    most = tl.max(tl.load(p_part + (2 * sample + which) * tiles + o_r, mask=o_r < tiles, other=0.0), 0)
    p = p_k + batch * s_kb + head * s_kh
    stride = s_k
    if which == 1:
        p = p_v + batch * s_vb + head * s_vh
        stride = s_v
    mean, limit = _guess(p, stride, keys, D, SAMPLES)
    limit = tl.where(limit > 0, limit, 1.0)
    if program == 0:
        tl.store(p_scale + 2 * sample + which, tl.maximum(limit, most) / LARGEST)
    if most > limit:
        for tile in range(program, tiles, PROGRAMS):
            o_t = tile * BT + tl.arange(0, BT)
            if which == 0:
                x = _rows(p, o_t, stride, BT, keys, D).to(tl.float32) - mean[None, :]
                row = sample.to(tl.int64) * keys + o_t
                x = x * (LARGEST / most)
                tl.store(o_k + row[:, None] * D + o_d[None, :], x.to(tl.float8e4nv), mask=(o_t < keys)[:, None])
            else:
                o_p = o_t - o_t % 16 + (o_t // 2 % 2) * 8 + (o_t // 4 % 4) * 2 + o_t % 2
                x = _rows(p, o_p, stride, BT, keys, D).to(tl.float32) - mean[None, :]
                x = tl.where((o_p < keys)[:, None], x * (LARGEST / most), 0.0)
                column = sample.to(tl.int64) * D + o_d
                tl.store(o_v + column[:, None] * padded + o_t[None, :], tl.trans(x.to(tl.float8e4nv)), mask=(o_t < padded)[None, :])
