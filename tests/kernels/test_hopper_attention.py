"""Laws of the Hopper kernel, emulated: equal to float64 attention under the dense mask; no deadlock, no race."""

import math
from pathlib import Path

import gluon_emulator
import pytest
import torch
from oracle import dense_attention, random_table

import foveate.kernels
from foveate import HilbertA
from foveate.kernels.schedule import schedule, shares

hopper = gluon_emulator.load(Path(foveate.kernels.__file__).with_name("hopper_attention.py"))


def attention(q, k, v, table, scale, programs):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    run = schedule(table, rows=hopper.ROWS, step=hopper.STEP, short=hopper.STEP, device=q.device)
    sharing = shares(run, q.shape[0] * q.shape[1], programs)
    assert hopper.takes(q, k, v)
    hopper.launch(q, k, v, out, lse, run, sharing, scale / math.log(2))
    return out, lse


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(
    "table",
    [
        random_table(0, (500,), (700,)), random_table(1, (77, 130, 300)), random_table(2, (5,), (1000,)),
        HilbertA(tiles=4).plan(((20, 24),), 33).tables[1], HilbertA(tiles=1).plan(((32, 32),), 0).tables[0],
    ],
)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128])
def test_output_and_lse_equal_the_dense_mask(table, dim, programs):
    q, k, v = (
        torch.randn(2, tokens, 2, dim).transpose(1, 2)
        for tokens in (table.query_tokens, table.key_tokens, table.key_tokens)
    )
    want, want_lse = dense_attention(q, k, v, table.to_dense(), scale=0.2)
    got, lse = attention(q, k, v, table, 0.2, programs)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5)


def test_layouts_that_the_copy_engine_can_address():
    tokens_first = torch.randn(2, 300, 3, 64).transpose(1, 2)
    heads_first = torch.randn(2, 3, 300, 64)
    packed = torch.randn(2, 300, 3, 3, 64).unbind(2)[1].transpose(1, 2)
    table = random_table(5, (300,))
    for x in (tokens_first, heads_first, packed, packed[:1], packed[:, 1:2], heads_first[:, :, :300]):
        want, _ = dense_attention(x, x, x, table.to_dense())
        torch.testing.assert_close(attention(x, x, x, table, 0.125, 3)[0].double(), want, rtol=1e-4, atol=1e-5)
    assert not hopper.takes(*[tokens_first[..., :32]] * 3)
    assert not hopper.takes(*[heads_first.mT.contiguous().mT] * 3)
    assert not hopper.takes(*[torch.randn(1, 1, 10, 65)[..., :64]] * 3)
