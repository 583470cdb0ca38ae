"""Laws of the emulated Hopper kernels: equal to masked float64 attention, without deadlocks or races."""

import gluon_emulator
import pytest
import torch
from oracle import dense_attention, random_table

from foveate import HilbertA
from foveate.kernels.block import block_attention as ops
from foveate.kernels.block.schedule import partition, schedule
from foveate.kernels.rows import row_attention as rows_ops
from foveate.ops.block_table import block_starts, block_table

hopper, backward = gluon_emulator.load(
    "foveate.kernels.block.hopper_attention", "foveate.kernels.block.hopper_backward"
)


def attention(q, k, v, table, scale, programs, scatter=None):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    run = partition(schedule(table, **hopper.CUT, device=q.device), q.shape[0] * q.shape[1], programs)
    assert hopper.addressable(q, k, v)
    hopper.launch(q, k, v, out, lse, run, scale, scatter=scatter)
    return out, lse


TABLES = [
    random_table(0, (500,), (700,)),
    random_table(1, (77, 130, 300)),
    random_table(2, (5,), (1000,)),
    HilbertA(tiles=4).plan(((20, 24),), 33).tables[1],
    HilbertA(tiles=1).plan(((16, 20),), 0).tables[0],
    random_table(3, (300,)).padded(9, 9, 99).with_first_keys(70),
    block_table([[i] for i in range(6)], block_starts(768, block=128)),  # one step per tile: copies run far ahead
]
PROGRAMS = pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), 5])


@PROGRAMS
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_output_and_lse_equal_the_dense_mask(table, dim, programs):
    q, k, v = (
        torch.randn(2, tokens, 2, dim).transpose(1, 2)
        for tokens in (table.query_tokens, table.key_tokens, table.key_tokens)
    )
    want, want_lse = dense_attention(q, k, v, table.to_dense(), scale=0.2)
    place = torch.randperm(table.query_tokens) if programs > 1 else None
    got, lse = attention(q, k, v, table, 0.2, programs, place)
    got = got if place is None else got[:, :, place]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5)


def test_addressable_layouts_equal_the_dense_mask_and_other_layouts_are_recognised():
    tokens_first = torch.randn(2, 300, 3, 64).transpose(1, 2)
    heads_first = torch.randn(2, 3, 300, 64)
    packed = torch.randn(2, 300, 3, 3, 64).unbind(2)[1].transpose(1, 2)
    table = random_table(5, (300,))
    for x in (tokens_first, heads_first, packed, packed[:1], packed[:, 1:2], heads_first[:, :, :300]):
        want, _ = dense_attention(x, x, x, table.to_dense())
        torch.testing.assert_close(attention(x, x, x, table, 0.125, 3)[0].double(), want, rtol=1e-4, atol=1e-5)
    assert not hopper.addressable(*[tokens_first[..., :32]] * 3)
    assert not hopper.addressable(*[tokens_first[:, :, :0]] * 3)
    assert not hopper.addressable(*[heads_first.mT.contiguous().mT] * 3)
    assert not hopper.addressable(*[torch.randn(1, 1, 10, 65)[..., :64]] * 3)
    # not aligned to 16 bytes; samples, then heads, not a whole number of tokens apart; every other channel
    assert not hopper.addressable(torch.randn(115201)[1:].view(2, 3, 300, 64))
    assert not hopper.addressable(torch.randn(2, 57604)[:, :57600].view(2, 300, 3, 64).transpose(1, 2))
    assert not hopper.addressable(torch.randn(1, 3, 19204)[..., :19200].view(1, 3, 300, 64))
    assert not hopper.addressable(torch.randn(1, 1, 300, 128)[..., ::2])


@PROGRAMS
@pytest.mark.parametrize("table", TABLES)
def test_every_gradient_equals_the_dense_mask(table, programs):
    q, k, v = (
        torch.randn(2, tokens, 2, 64).transpose(1, 2).requires_grad_()
        for tokens in (table.query_tokens, table.key_tokens, table.key_tokens)
    )
    out, lse = dense_attention(q, k, v, table.to_dense(), scale=0.2)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    has_keys = lse.isfinite()
    expected = torch.autograd.grad((out * grad_out).sum() + (lse * grad_lse)[has_keys].sum(), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    delta = ((out * grad_out).sum(-1) - grad_lse).detach().float()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    given = q, k, v, grad_out.float(), lse.detach().float(), delta
    for launch, pattern, written in (
        (backward.launch_queries, table, grads[:1]),
        (backward.launch_keys, table.transpose(), grads[1:]),
    ):
        run = schedule(pattern, **backward.CUT, device=q.device)
        launch(*given, *written, partition(run, 4, programs), 0.2)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), want.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("samples", [(), (2,)])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (700, 300), (300, 300), (513, 64), (900, 129)])
def test_causal_rows_equal_the_dense_mask(monkeypatch, tokens, chosen, samples, dim):
    """Rows are the same for all samples, or differ."""
    monkeypatch.setattr(rows_ops, "hopper_attention", hopper)
    rows = torch.rand(*samples, tokens).argsort()[..., :chosen].sort().values
    q = torch.randn(2, chosen, 6, dim).transpose(1, 2)
    k, v = (torch.randn(2, 2, tokens, dim) for _ in range(2))
    mask = (rows[..., None] >= torch.arange(tokens)).unsqueeze(-3)
    want = dense_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask, 0.2)
    got = rows_ops.row_attention(q, k, v, rows, 0.2, with_lse=True, hopper=True)
    torch.testing.assert_close(got, tuple(x.float() for x in want), rtol=1e-4, atol=1e-5)


def test_plans_of_rows_are_not_reused_for_other_samples_and_tokens(monkeypatch):
    monkeypatch.setattr(rows_ops, "hopper_attention", hopper)
    rows = torch.arange(100, 260)
    for batch, tokens in ((1, 260), (2, 260), (2, 500)):
        q, k, v = (torch.randn(batch, 2, n, 64) for n in (160, tokens, tokens))
        want, _ = dense_attention(q, k, v, rows[:, None] >= torch.arange(tokens), 0.2)
        got, _ = rows_ops.row_attention(q, k, v, rows, 0.2, hopper=True)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def emulated(monkeypatch):
    """Make the op run the emulated kernels, as on a GPU with three multiprocessors."""
    monkeypatch.setattr(ops, "hopper_attention", hopper)
    monkeypatch.setattr(ops, "hopper_backward", backward)
    monkeypatch.setattr(ops, "multiprocessors", lambda device: 3)


@pytest.mark.usefixtures("emulated")
def test_partitions_are_not_reused_for_other_numbers_of_samples():
    table = random_table(7, (150,))
    for batch in (1, 2):
        q, k, v = torch.randn(3, batch, 2, 150, 64)
        want, _ = dense_attention(q, k, v, table.to_dense())
        got, _ = ops.block_attention(q, k, v, table, 0.125, False, kernels="hopper")
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real kernels")
@pytest.mark.parametrize("keyless", [False, True])
@pytest.mark.usefixtures("emulated")
def test_the_op_equals_the_dense_mask(keyless):
    table = block_table([[0], [], [0, 2]], block_starts(150)) if keyless else random_table(7, (150,))
    q, k, v = (torch.randn(1, 150, 2, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    want, want_lse = dense_attention(q, k, v, table.to_dense())
    got, lse = ops.block_attention(q, k, v, table, 0.125, True, kernels="hopper")
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5)
    weight, lse_weight, has_keys = torch.randn_like(want), torch.randn_like(want_lse), want_lse.isfinite()
    expected = torch.autograd.grad((want * weight).sum() + (want_lse * lse_weight)[has_keys].sum(), (q, k, v))
    loss = (got.double() * weight).sum() + (lse.double() * lse_weight)[has_keys].sum()
    torch.testing.assert_close(torch.autograd.grad(loss, (q, k, v)), expected, rtol=1e-3, atol=1e-4)
