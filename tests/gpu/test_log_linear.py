"""Laws of the compiled log-linear kernels: equal to masked float64 attention with the same picks."""

import pytest
import torch
from log_linear_oracle import check, check_readers, pooled, relative, select_nodes

from foveate.kernels.log_linear import backward, select_blocks
from foveate.kernels.log_linear.joint_log_linear_attention import joint_log_linear_attention
from foveate.kernels.log_linear.log_linear_attention import log_linear_attention
from foveate.ops import log_linear_attention as attend
from foveate.ops.joint_attention import portable
from foveate.ops.log_linear_attention import Options

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float16: (2e-3, 4e-3), torch.bfloat16: (8e-3, 1.5e-2)}  # output, gradients
OPTIONS = Options(8, 16, 2, 2, True, 0.125, False, True)


def heads_of(tokens, dim, dtype, batch=2, heads=2):
    """Tensors in the layout of models, with the heads of a token next to each other."""
    return torch.randn(batch, tokens, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k"),
    [(1, 1, 8), (17, 1, 3), (257, 2, 1), (1000, 1, 5), (1024, 1, 8), (1999, 2, 8), (1999, 3, 13)],
)
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_output_lse_and_every_gradient_equal_float64(tokens, levels, top_k, dim, dtype):
    q, k, v, *extras = (heads_of(n, dim, dtype) for n in (tokens, tokens, tokens, 77, 77))
    options = OPTIONS._replace(top_k=top_k, levels=levels, enriched=levels, scale=dim**-0.5)
    check(log_linear_attention, (q, k, v), extras, None, options, *TOLERANCES[dtype])


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_other_block_sizes_padding_and_exclusion_equal_float64(block, exclude, masked):
    real = torch.rand(2, 1500, device="cuda") > 0.3 if masked else None
    qkv = [heads_of(1500, 64, torch.bfloat16) for _ in range(3)]
    options = OPTIONS._replace(top_k=3, block_size=block, scale=0.2, exclude_selected=exclude, full=False)
    check(log_linear_attention, qkv, (), real, options, *TOLERANCES[torch.bfloat16])


def test_keys_that_all_queries_pick_are_split_and_deterministic(monkeypatch):
    q, k, v = (heads_of(1999, 64, torch.bfloat16) for _ in range(3))
    q += 1
    k[:, :, 160:176] += 3
    monkeypatch.setattr(backward, "CHUNK", 256)  # no other test records a call of this kind
    options = OPTIONS._replace(top_k=2, full=False)
    check(log_linear_attention, (q, k, v), (), None, options, *TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize(
    ("tokens", "top_k", "levels"), [(80_000, 8, 2), (5000, 128, 1), (1_100_000, 3, 3), (70_000, 8, 1)]
)
def test_readers_equal_the_transposed_selection(tokens, top_k, levels):
    q, k = (torch.randn(1, 2, tokens, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k[:, :, : tokens // 50] += 0.2  # some nodes have many readers
    q += 0.2
    check_readers(q, k, None, top_k, 16, levels)


def test_picks_equal_brute_force_over_the_rounded_means():
    q, k = (heads_of(4000, 64, torch.float16, batch=1, heads=1) for _ in range(2))
    lists, counts = select_blocks.select_blocks(q, k, None, 8, 16, 2)
    real = torch.ones(1, 4000, dtype=torch.bool)
    queries, keys = ([pooled(x.cpu().double(), real, 16, level)[0][0, 0].half() for level in (1, 2)] for x in (q, k))
    want = select_nodes(queries, keys, [count[0].cpu() for count in counts], 8, 16)
    same = [set(a) == set(b) for got, those in zip(lists, want, strict=True)
            for a, b in zip(got[0, 0].tolist(), those, strict=True)]  # fmt: skip
    assert sum(same) > 0.98 * len(same)  # products are summed in another order


def test_compiled_calls_give_the_same_bits():
    q, k, v = (heads_of(3000, 64, torch.bfloat16).requires_grad_() for _ in range(3))
    options = OPTIONS._replace(full=False)
    call = lambda q, k, v: log_linear_attention(q, k, v, None, None, None, None, options)[:2]  # noqa: E731
    results = []
    for run in (call, torch.compile(call, fullgraph=True)):
        out, lse = run(q, k, v)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_repeated_call_does_not_synchronize_with_the_gpu_and_has_the_same_bits(no_synchronization):
    inputs = [
        [torch.randn(2, 3, 5000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        for _ in range(2)
    ]

    def gradients(q, k, v):
        out = attend(q, k, v).out
        return out, *torch.autograd.grad(out, (q, k, v), v.detach())

    first = [gradients(*x) for x in inputs]
    with no_synchronization():
        again = [gradients(*x) for x in inputs]
    for want, got in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(("text", "image", "levels"), [(77, 1000, 1), (0, 600, 2), (512, 1024, 1)])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("scattered", [False, True])
def test_text_and_image_together_equal_float64(text, image, levels, dim, scattered):
    shape = text + image, dim, torch.bfloat16
    inputs = [heads_of(*shape).requires_grad_() for _ in range(3)]
    grad, place = heads_of(*shape), torch.randperm(text + image, device="cuda") if scattered else None
    options = OPTIONS._replace(top_k=64, levels=levels, enriched=levels, scale=dim**-0.5)
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    want = portable(*exact, image, None if place is None else place.cpu(), options)
    got = joint_log_linear_attention(*inputs, image, place, options)
    assert relative(got, want) < TOLERANCES[torch.bfloat16][0]
    wanted = torch.autograd.grad(want, exact, grad.double().cpu())
    for ours, theirs in zip(torch.autograd.grad(got, inputs, grad), wanted, strict=True):
        assert relative(ours, theirs) < TOLERANCES[torch.bfloat16][1]
