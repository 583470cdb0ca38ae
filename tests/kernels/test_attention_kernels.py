"""Laws of the block attention kernels in Triton's interpreter: equal to masked float64 attention."""

import pytest
import torch
from far import far_apart
from oracle import dense_attention, random_table

from foveate import HilbertA
from foveate.kernels.block import block_attention as kernels
from foveate.kernels.block.block_attention import KernelConfig, block_attention
from foveate.ops.block_table import block_starts, block_table

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernels")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tile sizes that are fast to interpret and still need full and short steps."""
    monkeypatch.setattr(kernels, "FORWARD", (KernelConfig(64, 64, 4, 2),))
    monkeypatch.setattr(kernels, "BACKWARD_QUERIES", (KernelConfig(64, 32, 4, 2),))
    monkeypatch.setattr(kernels, "BACKWARD_KEYS", (KernelConfig(64, 32, 4, 2),))


def qkv(queries, keys, dtype, dim, batch=1, heads=2):
    return [
        torch.randn(batch, n, heads, dim, dtype=dtype).transpose(1, 2).requires_grad_() for n in (queries, keys, keys)
    ]


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
@pytest.mark.parametrize(
    ("queries", "keys", "dim"),
    [
        *(((63,), (63,), 16), ((200,), (150,), 40), ((1, 70), (9,), 96)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((500,), (300,), 40), ((77, 130), (77, 130), 64))),
    ],
)
@pytest.mark.parametrize("scattered", [False, True])
def test_output_and_every_gradient_equal_the_dense_mask(queries, keys, dim, dtype, tolerance, scattered):
    table = random_table(int(torch.randint(2**31, ())), queries, keys)
    q, k, v = qkv(sum(queries), sum(keys), dtype, dim)
    mask = table.to_dense()
    want, want_lse = dense_attention(q, k, v, mask)
    place = torch.randperm(sum(queries)) if scattered else None
    got, lse = block_attention(q, k, v, table, dim**-0.5, True, place)
    has_keys = want_lse.isfinite()
    assert (got.dtype, got.stride()) == (dtype, q.stride())
    assert torch.equal(lse.isfinite(), has_keys)
    got = got if place is None else got[:, :, place]
    assert torch.equal(got[~has_keys], torch.zeros_like(got[~has_keys]))
    if not has_keys.any():
        return
    assert relative(got, want) < tolerance
    assert relative(lse[has_keys], want_lse[has_keys]) < tolerance
    weight, lse_weight = torch.randn_like(want), torch.randn_like(want_lse)
    expected = torch.autograd.grad((want * weight).sum() + (want_lse * lse_weight)[has_keys].sum(), (q, k, v))
    loss = (got.double() * weight).sum() + (lse.double() * lse_weight)[has_keys].sum()
    for grad, other in zip(torch.autograd.grad(loss, (q, k, v)), expected, strict=True):
        assert grad.dtype == dtype
        assert relative(grad, other) < tolerance


def test_a_hilbert_table_and_several_samples():
    table = HilbertA(tiles=4).plan(((16, 16),), 33).tables[1]
    q, k, v = qkv(289, 289, torch.float32, 32, batch=2, heads=1)
    want, _ = dense_attention(q, k, v, table.to_dense(), scale=0.3)
    got, _ = block_attention(q, k, v, table, 0.3, False)
    assert relative(got, want) < 1e-5
    weight = torch.randn_like(want)
    expected = torch.autograd.grad((want * weight).sum(), (q, k, v))
    for grad, other in zip(torch.autograd.grad((got.double() * weight).sum(), (q, k, v)), expected, strict=True):
        assert relative(grad, other) < 1e-5


def test_any_strides_and_any_scale():
    table = random_table(4, (100,))
    packed = torch.randn(1, 100, 3, 2, 16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    strided = [x.mT.contiguous().mT for x in (q, k, v)]  # tokens innermost
    for scale in (0.25, -0.25, 1e-9, 30.0):
        want, _ = dense_attention(q, k, v, table.to_dense(), scale=scale)
        for inputs in ((q, k, v), strided):
            assert relative(block_attention(*inputs, table, scale, False)[0], want) < 1e-5


def test_gradients_reach_the_inputs_through_the_lse_alone():
    starts = block_starts(80)
    table = block_table([[0, 1], [1]], starts)
    q, k, v = qkv(80, 80, torch.float32, 16)
    _, lse = block_attention(q, k, v, table, 0.25, True)
    got = torch.autograd.grad(lse.sum(), (q, k))
    expected = torch.autograd.grad(dense_attention(q, k, v, table.to_dense())[1].sum(), (q, k))
    for grad, other in zip(got, expected, strict=True):
        assert relative(grad, other) < 1e-5


def test_every_output_is_written():
    q, k, v = qkv(150, 150, torch.float32, 16)
    assert torch.empty_like(q).isnan().all()
    table = block_table([[0], [], [0, 2]], block_starts(150))  # no block reads block 1
    out, lse = block_attention(q, k, v, table, 0.25, True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(x.isnan().any() for x in (out, lse, *grads))
    assert not any(grad[:, :, 64:128].any() for grad in grads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter, for masked values
def test_gradients_are_right_where_exp_of_minus_lse_overflows():
    table = random_table(7, (150,))
    q, k, v = qkv(150, 150, torch.float32, 64)
    q, k = 0.1 * q + 6, 0.1 * k - 6
    want, lse = dense_attention(q, k, v, table.to_dense())
    assert lse[lse.isfinite()].max() < -88  # exp(-LSE) overflows float32
    got, _ = block_attention(q, k, v, table, 0.125, False)
    weight = torch.randn_like(want)
    expected = torch.autograd.grad((want * weight).sum(), (q, k, v))
    for ours, theirs in zip(torch.autograd.grad((got * weight).sum(), (q, k, v)), expected, strict=True):
        assert relative(ours, theirs) < 3e-3  # float32 sums that nearly cancel


@pytest.mark.parametrize("dimension", ["batch", "heads", "tokens"])
def test_strides_may_exceed_32_bits(dimension):
    table = block_table([[0, 1], [1]], block_starts(65))
    *inputs, grad = far_apart(dimension)
    inputs = [x.requires_grad_() for x in inputs]
    want, _ = dense_attention(*inputs, table.to_dense())
    got, _ = block_attention(*inputs, table, 0.25, False)
    assert relative(got, want) < 3e-3
    expected = torch.autograd.grad(want, inputs, grad.double())
    for ours, theirs in zip(torch.autograd.grad(got, inputs, grad), expected, strict=True):
        assert relative(ours, theirs) < 3e-3


@pytest.mark.slow
def test_the_ops_pass_opcheck():
    inputs = *qkv(70, 70, torch.float32, 16), *random_table(1, (70,)), torch.randperm(70), 0.25, "triton"
    torch.library.opcheck(torch.ops.foveate.block_attention.default, inputs)


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_table_for_other_tokens_is_refused(name):
    q, k, v = qkv(70, 70, torch.float32, 64)
    with pytest.raises(ValueError, match="for 71 queries and 71 keys, but q has 70"):
        block_attention(q, k, v, random_table(1, (71,)), 0.25, False, kernels=name)


def test_the_kernels_do_not_support_cpus():
    assert not kernels.supports(torch.device("cpu"), torch.bfloat16, 128)
