"""Laws of attention over a block table: equal to masked float64 attention."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention, random_table

from foveate.ops.block_attention import block_attention
from foveate.ops.block_table import block_starts, block_table

SIZES = [(63,), (500,), (1000,), (77, 400, 523), (128, 0, 1)]


def qkv(queries, keys, dtype=torch.float64, batch=2, heads=3, dim=16):
    return [torch.randn(batch, heads, n, dim, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]


@pytest.mark.parametrize("runs", SIZES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_output_and_every_gradient_equal_the_dense_mask(runs, with_lse):
    table = random_table(int(torch.randint(2**31, ())), runs)
    q, k, v = qkv(sum(runs), sum(runs))
    mask = table.to_dense()
    want, want_lse = dense_attention(q, k, v, mask)
    got, lse = (
        block_attention(q, k, v, table, return_lse=True) if with_lse else (block_attention(q, k, v, table), None)
    )
    weight, lse_weight, has_keys = torch.randn_like(want), torch.randn_like(want_lse), mask.any(1)

    def gradients(out, lse):
        loss = (out * weight).sum()
        if with_lse:
            loss = loss + (lse * lse_weight)[:, :, has_keys].sum()
        return torch.autograd.grad(loss, (q, k, v))

    torch.testing.assert_close(got, want)
    if with_lse:
        torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(gradients(got, lse), gradients(want, want_lse))


@given(seed=st.integers(0, 2**31), queries=st.integers(1, 200), keys=st.integers(1, 300), block=st.integers(1, 128))
def test_any_number_of_queries_keys_and_block_size(seed, queries, keys, block):
    table = random_table(seed, (queries,), (keys,), block=block)
    q, k, v = qkv(queries, keys, batch=1, heads=2, dim=4)
    torch.testing.assert_close(
        block_attention(q, k, v, table, scale=0.3), dense_attention(q, k, v, table.to_dense(), scale=0.3)[0]
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)]
)
def test_every_dtype_stays_near_float64_and_keeps_its_dtype(dtype, tolerance):
    table = random_table(3, (130, 200))
    q, k, v = qkv(330, 330, dtype)
    want, want_lse = dense_attention(q, k, v, table.to_dense())
    got, lse = block_attention(q, k, v, table, return_lse=True)
    assert (got.dtype, lse.dtype) == (dtype, torch.float32)
    has_keys = want_lse.isfinite()
    assert (got - want).norm() < tolerance * want.norm()
    assert torch.equal(lse.isfinite(), has_keys)
    assert (lse - want_lse)[has_keys].norm() < tolerance * want_lse[has_keys].norm()
    assert (block_attention(q, k, v, table) - want).norm() < tolerance * want.norm()
    weight = torch.randn_like(want)
    got_grads = torch.autograd.grad((got.double() * weight).sum(), (q, k, v))
    for got_grad, grad in zip(got_grads, torch.autograd.grad((want * weight).sum(), (q, k, v)), strict=True):
        assert got_grad.dtype == dtype
        assert (got_grad - grad).norm() < tolerance * grad.norm()


def test_scatter_permutes_the_output_only():
    table, place = random_table(4, (130, 200)), torch.randperm(330)
    q, k, v = qkv(330, 330)
    want, want_lse = block_attention(q, k, v, table, return_lse=True)
    got, lse = block_attention(q, k, v, table, return_lse=True, scatter=place)
    weight = torch.randn_like(want)
    gradients = torch.autograd.grad((want * weight).sum(), (q, k, v))
    assert torch.equal(got[:, :, place], want)
    assert torch.equal(lse, want_lse)
    assert torch.equal(torch.autograd.grad((got[:, :, place] * weight).sum(), (q, k, v))[0], gradients[0])


def test_the_whole_table_is_plain_attention():
    starts = block_starts(300)
    everything = block_table([range(5)] * 5, starts)
    q, k, v = qkv(300, 300)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(block_attention(q, k, v, everything), want)


def test_layout_of_the_queries_is_kept():
    q = torch.randn(1, 300, 3, 16).transpose(1, 2)
    out = block_attention(q, q, q, random_table(0, (300,)))
    assert out.stride() == q.stride()


def test_padded_and_moved_tables_give_the_same_output():
    table = random_table(5, (300,))
    q, k, v = qkv(300, 300)
    want = block_attention(q, k, v, table)
    assert torch.equal(block_attention(q, k, v, table.padded(20, 20, 400)), want)
    assert torch.equal(block_attention(q, k, v, table.to("cpu")), want)


def test_tables_that_share_a_tensor_do_not_share_a_cache_entry():
    table = random_table(5, (320,))
    other = table._replace(query_starts=torch.tensor([0, 40, 100, 164, 228, 320], dtype=torch.int32))
    q, k, v = qkv(320, 320)
    for each in (table, other, table):
        torch.testing.assert_close(block_attention(q, k, v, each), dense_attention(q, k, v, each.to_dense())[0])


def test_the_op_passes_opcheck():
    q, k, v = qkv(130, 130, torch.float32, batch=1, heads=1)
    op = torch.ops.foveate.block_attention_portable.default
    torch.library.opcheck(op, (q, k, v, *random_table(1, (130,)), 0.25, True))


@pytest.mark.usefixtures("as_a_user")
def test_mismatched_inputs_are_refused_with_their_values():
    table = random_table(0, (100,))
    q, k, v = qkv(99, 100)
    with pytest.raises(ValueError, match="for 100 queries and 100 keys, but q has 99"):
        block_attention(q, k, v, table)
    with pytest.raises(ValueError, match=r"\[2, 3, 99, 16\], \[2, 3, 100, 8\]"):
        block_attention(q, k[..., :8], v[..., :8], table)
    with pytest.raises(ValueError, match=r"float64 on cpu, torch.float32"):
        block_attention(q, k.float(), v, table)
    with pytest.raises(ValueError, match=r"got \[2, 3, 99, 0\]"):
        block_attention(q[..., :0], k[..., :0], v[..., :0], table)
    for scale in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale must be finite and not 0, not {scale}"):
            block_attention(k, k, v, table, scale=scale)
    with pytest.raises(ValueError, match="each of 100 queries"):
        block_attention(k, k, v, table, scatter=torch.arange(99))


def test_empty_batches_and_no_heads_give_empty_outputs():
    table = random_table(0, (100,))
    q = torch.randn(2, 3, 100, 16)
    for empty in (q[:0], q[:, :0]):
        out, lse = block_attention(empty, empty, empty, table, return_lse=True)
        assert (out.shape, lse.shape) == (empty.shape, empty.shape[:3])


def test_autocast_changes_no_bit():
    table = block_table([[0], [1], [0], [1]], block_starts(256))
    inputs = [x.float().detach().requires_grad_() for x in qkv(256, 256)]

    def run():
        out, lse = block_attention(*inputs, table, return_lse=True)
        alone = block_attention(*inputs, table)
        return out, lse, alone, *torch.autograd.grad((out + alone).sum() + lse.sum(), inputs)

    want = run()
    with torch.autocast("cpu", torch.bfloat16):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


MEMORY = """
import resource, torch
from foveate import HilbertA
from foveate.ops.block_attention import block_attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for side in (32, 96):  # the first loads libraries
    table = HilbertA(tiles=16).plan(((side, side),), 512).tables[1]
    q, k, v = (torch.randn(1, side**2 + 512, 2, 128).transpose(1, 2).requires_grad_() for _ in range(3))
    before = peak()
    block_attention(q, k, v, table)
    forward = peak()
    outputs = block_attention(q, k, v, table, return_lse=True)
    with_lse = peak()
    torch.autograd.grad(outputs, (q, k, v), [torch.randn_like(x) for x in outputs])
    peaks = forward, with_lse, peak()
print(*((each - before) / q.nbytes for each in peaks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.slow
def test_memory_at_9728_tokens_stays_below_twice_the_inputs_and_outputs():
    printed = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    forward, with_lse, backward = map(float, printed.split())
    assert forward - 1 < 2 * 4  # q, k, v and out; subtract out itself
    assert with_lse - 1 < 2 * 4
    assert backward - 5 < 2 * 8  # also their gradients; five of the eight are new
