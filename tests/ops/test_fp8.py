"""Laws of attention in FP8: near float64, whatever keys and values have in common, and only for inference."""

import pytest
import torch
from oracle import dense_attention, random_table

from foveate.ops.block_attention import block_attention
from foveate.ops.fp8 import LARGEST, round_inputs

RUNS = 130, 200


def qkv():
    return [torch.randn(2, 3, sum(RUNS), 16) for _ in range(3)]


def error(q, k, v, table):
    want, _ = dense_attention(q, k, v, table.to_dense())
    return ((block_attention(q, k, v, table, precision="fp8") - want).norm() / want.norm()).item()


def test_output_is_near_float64_for_keys_and_values_of_any_mean_and_scale():
    q, k, v = qkv()
    table = random_table(3, RUNS)
    plain = error(q, k, v, table)
    assert plain < 0.07
    common = 50 * torch.randn(1, 3, 1, 16)
    assert error(q, k + common, v, table) < plain + 0.01
    assert error(q, k, v + common, table) < plain / 10
    for scale in (1e-6, 1e6):
        assert error(q / scale, k * scale, v * scale, table) == pytest.approx(plain, abs=0.01)
    k[:, :, 77] *= 1000
    assert error(q, k, v, table) < 0.2


def test_every_number_is_within_its_range():
    q, k, v = qkv()
    k[0, 0, 5], v[0, 0, 6] = 1e6, -1e6
    rounded = round_inputs(q, k, v)
    for x in rounded[:3]:
        assert x.float().abs().max() <= LARGEST
    for x, y in zip(rounded.dequantized(), (q, k, v), strict=True):
        assert (x - y).norm() < 0.04 * y.norm()


def test_zeros_and_empty_inputs():
    table = random_table(3, RUNS)
    zeros = torch.zeros(1, 1, sum(RUNS), 16)
    assert not block_attention(zeros, zeros, zeros, table, precision="fp8").any()
    empty = zeros[:, :, :0]
    assert not block_attention(zeros, empty, empty, random_table(3, RUNS, (0,)), precision="fp8").any()


def test_scatter_and_dtype():
    table, place = random_table(4, RUNS), torch.randperm(sum(RUNS))
    q, k, v = (x.half() for x in qkv())
    want = block_attention(q, k, v, table, precision="fp8")
    got = block_attention(q, k, v, table, precision="fp8", scatter=place)
    assert torch.equal(got[:, :, place], want)
    assert got.dtype == torch.float16


def test_what_fp8_cannot_do_is_refused():
    table = random_table(3, RUNS)
    q, k, v = qkv()
    with pytest.raises(ValueError, match="no return_lse"):
        block_attention(q, k, v, table, precision="fp8", return_lse=True)
    with pytest.raises(ValueError, match=r"no gradients: use torch\.no_grad"):
        block_attention(q.requires_grad_(), k, v, table, precision="fp8")
    with torch.no_grad():
        block_attention(q, k, v, table, precision="fp8")
