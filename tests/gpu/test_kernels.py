"""Laws of the compiled kernels: equal to float64 references, deterministic, capturable in CUDA graphs."""

import pytest
import tiny
import torch
from oracle import dense_attention, random_table

import foveate
from foveate import HilbertA, ToMA
from foveate.kernels.block import flash_attention
from foveate.kernels.merging.facility_location import facility_location as pick
from foveate.kernels.merging.soft_assignment import soft_assignment as assign
from foveate.ops import dispatch, facility_location, region_matmul, soft_assignment
from foveate.ops.block_attention import block_attention

pytestmark = pytest.mark.gpu


def qkv(tokens, dim, dtype=torch.bfloat16, batch=2, heads=3):
    return [
        torch.randn(batch, tokens, heads, dim, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]


def relative(got, want):
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-9)).item()  # a table may be empty


def only(monkeypatch, op, name, dtype, size):
    """Leave an op with only one backend, or skip the test if that does not run here."""
    here = [backend for backend in dispatch.backends(op, torch.device("cuda"), dtype, size) if backend.name == name]
    if not here:
        pytest.skip(f"{name} does not support {dtype} and size {size} on this GPU")
    monkeypatch.setitem(dispatch._BACKENDS, op, here)


@pytest.mark.parametrize("runs", [(63,), (77, 400, 523), (128, 0, 1)])
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 160, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kernels", ["triton", "flash", "hopper"])
def test_output_lse_and_every_gradient_equal_the_dense_mask(monkeypatch, runs, dim, dtype, tolerance, kernels):
    only(monkeypatch, "block_attention", kernels, dtype, dim)
    table = random_table(int(torch.randint(2**31, ())), runs)
    q, k, v = qkv(sum(runs), dim, dtype)
    want, want_lse = dense_attention(q, k, v, table.to_dense().cuda())
    place = torch.randperm(sum(runs), device="cuda")
    got, lse = block_attention(q, k, v, table, return_lse=True, scatter=place)
    got = got[:, :, place]
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert relative(got, want) < tolerance
    assert relative(lse[seen], want_lse[seen]) < 1e-3
    weight, lse_weight = torch.randn_like(want), torch.randn_like(want_lse)
    expected = torch.autograd.grad((want * weight).sum() + (want_lse * lse_weight)[seen].sum(), (q, k, v))
    loss = (got.double() * weight).sum() + (lse.double() * lse_weight)[seen].sum()
    first, second = (torch.autograd.grad(loss, (q, k, v), retain_graph=True) for _ in range(2))
    for grad, again, other in zip(first, second, expected, strict=True):
        assert relative(grad, other) < tolerance
        assert torch.equal(grad, again)


@pytest.mark.parametrize("kernels", ["triton", "flash", "hopper"])
def test_there_may_be_more_keys_than_queries(monkeypatch, kernels):
    only(monkeypatch, "block_attention", kernels, torch.bfloat16, 64)
    table = random_table(int(torch.randint(2**31, ())), (77, 400)).with_first_keys(70)
    (q, *_), (_, k, v) = qkv(477, 64), qkv(547, 64)
    want, _ = dense_attention(q, k, v, table.to_dense().cuda())
    got, weight = block_attention(q, k, v, table), torch.randn_like(want)
    assert relative(got, want) < 1e-2
    grads, expected = (torch.autograd.grad((x.double() * weight).sum(), (q, k, v)) for x in (got, want))
    assert all(relative(*both) < 1e-2 for both in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_of_flash_attention_4_equal_the_dense_mask(monkeypatch, dim):
    only(monkeypatch, "block_attention", "flash", torch.bfloat16, dim)
    table = random_table(int(torch.randint(2**31, ())), (77, 400, 523))
    q, k, v = qkv(1000, dim)
    want, want_lse = dense_attention(q, k, v, table.to_dense().cuda())
    weight, lse_weight, seen = torch.randn_like(want), torch.randn_like(want_lse), want_lse.isfinite()
    expected = torch.autograd.grad((want * weight).sum() + (want_lse * lse_weight)[seen].sum(), (q, k, v))
    with torch.no_grad():
        out, lse = flash_attention.forward(q, k, v, table, dim**-0.5)
        grads = flash_attention.backward(
            weight.to(q.dtype), lse_weight.where(seen, 0).float(), q, k, v, out, lse, table, dim**-0.5
        )
    assert all(relative(*both) < 1e-2 for both in zip(grads, expected, strict=True))


def test_the_table_of_1024_px_equals_the_dense_mask():
    table = HilbertA(tiles=16).plan(((64, 64),), 512).tables[3]
    q, k, v = qkv(4608, 128, batch=1, heads=2)
    want, _ = dense_attention(q, k, v, table.to_dense().cuda())
    assert relative(block_attention(q, k, v, table), want) < 1e-2


@pytest.mark.parametrize("kernels", ["triton", "flash", "hopper"])
def test_block_attention_can_be_captured_in_a_cuda_graph_and_compiled(monkeypatch, kernels, as_a_user):
    only(monkeypatch, "block_attention", kernels, torch.bfloat16, 128)
    table = HilbertA(tiles=4).plan(((32, 32),), 77).tables[1]
    q, k, v = (x.detach() for x in qkv(32 * 32 + 77, 128))
    block_attention(q, k, v, table)  # computes the schedule and compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_attention(q, k, v, table)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    want = block_attention(q, k, v, table)
    assert torch.equal(out, want)
    compiled = torch.compile(lambda q, k, v, table: block_attention(q, k, v, table), fullgraph=True)
    assert torch.equal(compiled(q, k, v, table), want)


def test_the_ops_pass_opcheck():
    place = torch.randperm(130, device="cuda")
    inputs = (*qkv(130, 64, batch=1, heads=1), *random_table(1, (130,)), place, 0.125, "triton")
    torch.library.opcheck(torch.ops.foveate.block_attention.default, inputs)


def test_gradients_of_a_flux_equal_those_of_the_portable_path(monkeypatch):
    model = tiny.flux(dtype=torch.bfloat16).cuda()
    x = {
        name: value.cuda()
        for name, value in tiny.inputs((32, 40), dtype=torch.bfloat16).items()
        if torch.is_tensor(value)
    }

    def gradients():
        model.zero_grad()
        with foveate.apply(model, HilbertA(tiles=4)) as run:
            model(**x)[0].float().square().mean().backward()
            backends = {row.backend for row in run.summary().layers}
        return backends, torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    backends, got = gradients()
    assert backends == {dispatch.choose("block_attention", torch.device("cuda"), torch.bfloat16, 16).name}
    only(monkeypatch, "block_attention", "portable", torch.bfloat16, 16)
    backends, want = gradients()
    assert backends == {"portable"}
    assert relative(got, want) < 3e-2


@pytest.mark.parametrize(("tokens", "dim", "budget"), [(16, 3072, 8), (64, 640, 32), (100, 33, 9), (1, 5, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 5e-4), (torch.bfloat16, 2e-3)]
)
def test_assignment_equals_the_portable_path(tokens, dim, budget, dtype, tolerance):
    sets = torch.randn(5, tokens, dim, device="cuda", dtype=dtype)
    got = assign(sets, budget, 50.0)
    given, exact = sets.cpu().float(), torch.nn.functional.normalize(sets.cpu().double(), dim=-1)

    def served(picks):  # rounding may decide between nearly equal gains
        return (exact @ exact.take_along_dim(picks[..., None], 1).mT).amax(2).sum(1)

    assert relative(served(got[0].cpu()), served(soft_assignment.portable(given, budget, 50.0)[0])) < 1e-4
    want = soft_assignment.portable(given, budget, 50.0, got[0].cpu())
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert relative(ours.cpu(), theirs) < tolerance
    for picks in (None, got[0]):
        again = assign(sets, budget, 50.0, picks)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


@pytest.mark.parametrize(("tokens", "dim", "budget"), [(16, 3072, 8), (64, 640, 32), (128, 640, 64)])
def test_assignment_of_many_sets_is_deterministic(tokens, dim, budget):
    sets = torch.randn(256, tokens, dim, device="cuda", dtype=torch.bfloat16)  # enough programs to expose races
    got = assign(sets, budget, 50.0)
    for picks in (*5 * [None], got[0]):
        again = assign(sets, budget, 50.0, picks)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


@pytest.mark.parametrize(("tokens", "budget"), [(1, 1), (30, 7), (200, 31), (256, 128), (300, 300), (1024, 100)])
def test_picks_equal_the_portable_path_every_time(tokens, budget):
    similarity = torch.randint(-99, 99, (70, tokens, tokens), device="cuda").float()  # exact sums and many ties
    picks = pick(similarity, budget)
    assert torch.equal(picks.cpu(), facility_location.portable(similarity.cpu(), budget))
    assert all(torch.equal(pick(similarity, budget), picks) for _ in range(3))


@pytest.mark.parametrize(("plans", "batch"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("rows", "tokens"), [(8, 16), (3, 5), (1, 1), (32, 64), (20, 33)])
@pytest.mark.parametrize("text", [0, 77])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_region_products_and_their_gradients_equal_float64(plans, batch, rows, tokens, text, dtype):
    options = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    weights, x = torch.rand(plans, 7, rows, tokens, **options), torch.randn(batch, text + 7 * tokens, 648, **options)
    want = region_matmul.portable(weights.double(), x.double(), text)
    got = region_matmul.region_matmul(weights, x, text)
    assert relative(got, want) < 1e-2
    grad = torch.randn_like(got)
    expected = torch.autograd.grad(want, (weights, x), grad.double())
    for ours, theirs in zip(torch.autograd.grad(got, (weights, x), grad), expected, strict=True):
        assert relative(ours, theirs) < 1e-2


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize(("rows", "tokens"), [(8, 16), (3, 5), (32, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_region_products_of_reordered_tokens_and_their_gradients_equal_float64(plans, rows, tokens, dtype):
    options = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    weights, x = torch.rand(plans, 7, rows, tokens, **options), torch.randn(2, 9 + 7 * tokens, 648, **options)
    order = torch.randperm(x.shape[1], device="cuda")[2:]
    want = region_matmul.portable(weights.double(), x.double(), 7, order)
    got = region_matmul.region_matmul(weights, x, 7, order)
    assert relative(got, want) < 1e-2
    grad = torch.randn_like(got)
    expected = torch.autograd.grad(want, (weights, x), grad.double())
    for ours, theirs in zip(torch.autograd.grad(got, (weights, x), grad), expected, strict=True):
        assert relative(ours, theirs) < 1e-2


@pytest.mark.parametrize("groups", [[(5, 16, 8)], [(16, 64, 32)], [(9, 64, 48), (2, 5, 3), (1, 63, 16)]])
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dim", [640, 333])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_region_updates_and_their_gradients_equal_float64(groups, plans, ordered, dim, dtype):
    options = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    weights = [torch.rand(plans, *group, **options) for group in groups]
    tokens, merged = (sum(group[0] * group[side] for group in groups) for side in (1, 2))
    rest = [torch.randn(2, length, dim, **options) for length in (tokens, merged, merged)]
    order = torch.randperm(tokens, device="cuda") if ordered else None
    want = region_matmul.portable_update([w.double() for w in weights], *(part.double() for part in rest), order)
    got = region_matmul.region_update(weights, *rest, order)
    assert relative(got, want) < 1e-2
    grad = torch.randn_like(got)
    expected = torch.autograd.grad(want, (*weights, *rest), grad.double())
    for ours, theirs in zip(torch.autograd.grad(got, (*weights, *rest), grad), expected, strict=True):
        assert relative(ours, theirs) < 1e-2


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (18, 26)])
@pytest.mark.usefixtures("fixed_destinations")
def test_a_unet_that_merges_whole_blocks_equals_the_portable_path(monkeypatch, size):
    model = tiny.unet(dtype=torch.float16).cuda()
    x = tiny.unet_inputs(*size, batch=2, dtype=torch.float16)
    x = {name: value.cuda() if torch.is_tensor(value) else value for name, value in x.items()}
    x["added_cond_kwargs"] = {name: value.cuda() for name, value in x["added_cond_kwargs"].items()}

    def forward():
        with foveate.apply(model, ToMA(tile=(4, 4))):
            return model(**x)[0]

    got = forward()
    for op in ("region_matmul", "region_update"):
        only(monkeypatch, op, "portable", torch.float16, 16)
    assert relative(got, forward()) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_gpu_of_their_tensors():
    table = random_table(3, (500,))
    here = qkv(500, 64)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    assert torch.cuda.current_device() == 0
    (want, wanted), (got, grads) = (
        (out := block_attention(*x, table), torch.autograd.grad(out.square().sum(), x)) for x in (here, there)
    )
    assert torch.equal(got.to("cuda:0"), want)
    assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("kernels", ["triton", "flash", "hopper"])
def test_a_repeated_call_does_not_synchronize_with_the_gpu_and_has_the_same_bits(
    monkeypatch, no_synchronization, kernels
):
    only(monkeypatch, "block_attention", kernels, torch.bfloat16, 128)
    table = HilbertA(tiles=16).plan(((64, 64),), 512).tables[3]  # on the CPU
    inputs = [qkv(4608, 128, batch=1) for _ in range(2)]

    def gradients(q, k, v):
        out = block_attention(q, k, v, table)
        return out, *torch.autograd.grad(out, (q, k, v), v.detach())

    first = [gradients(*x) for x in inputs]
    with no_synchronization():
        again = [gradients(*x) for x in inputs]
    for want, got in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
