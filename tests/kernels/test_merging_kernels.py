"""Laws of the merging kernels in Triton's interpreter: equal to the portable paths."""

import pytest
import torch

from foveate.kernels.merging import facility_location as picking_kernel
from foveate.kernels.merging import region_matmul as matmul_kernel
from foveate.kernels.merging import soft_assignment as assignment_kernel
from foveate.kernels.merging.facility_location import facility_location
from foveate.kernels.merging.region_matmul import region_matmul
from foveate.kernels.merging.region_update import region_update
from foveate.kernels.merging.soft_assignment import soft_assignment
from foveate.methods import ToMA
from foveate.ops import dispatch
from foveate.ops import facility_location as picking_op
from foveate.ops import region_matmul as matmul_op
from foveate.ops import soft_assignment as assignment_op
from foveate.ops.region_matmul import portable_update

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernels")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("tokens", "dim", "budget"), [(1, 8, 1), (16, 40, 8), (30, 7, 30), (64, 96, 20), (100, 33, 9), (128, 9, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_assignment_equals_the_portable_path(tokens, dim, budget, dtype):
    sets = torch.randn(3, tokens, dim).to(dtype)
    want = assignment_op.portable(sets, budget, 20.0)
    got = soft_assignment(sets, budget, 20.0)
    torch.testing.assert_close(got, want)
    other = torch.randperm(tokens)[:budget].sort().values.expand(3, -1)
    torch.testing.assert_close(
        soft_assignment(sets, budget, 20.0, other), assignment_op.portable(sets, budget, 20.0, other)
    )


def test_assignment_takes_any_strides_and_ties_go_to_the_first():
    sets = torch.randn(2, 5, 12).mT  # [2, 12, 5]
    torch.testing.assert_close(soft_assignment(sets, 4, 9.0), assignment_op.portable(sets, 4, 9.0))
    twins = torch.randn(1, 6, 9).repeat_interleave(2, 1)
    assert (soft_assignment(twins, 6, 9.0)[0] % 2 == 0).all()
    picks, _, spread = soft_assignment(torch.zeros(1, 4, 3), 2, 9.0)
    assert picks.tolist() == [[0, 1]]
    assert torch.equal(spread, torch.full((1, 2, 4), 0.5))


@pytest.mark.parametrize(
    ("tokens", "budget"),
    [
        (1, 1),
        (16, 16),
        (30, 7),
        (256, 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((200, 31), (300, 5))),
    ],
)
def test_picks_equal_the_portable_path(tokens, budget):
    for low, high in ((-99, 99), (-99, 0), (0, 1)):  # exact sums and many ties
        similarity = torch.randint(low, high, (2, tokens, tokens)).float()
        assert torch.equal(facility_location(similarity, budget), picking_op.portable(similarity, budget))


@pytest.mark.parametrize(("plans", "batch"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("rows", "tokens"), [(8, 16), (3, 5), (1, 1), (20, 33)])
@pytest.mark.parametrize("text", [0, 19])
def test_products_and_their_gradients_equal_the_portable_path(plans, batch, rows, tokens, text):
    weights = torch.randn(plans, 6, rows, tokens, dtype=torch.float16).requires_grad_()
    x = torch.randn(batch, text + 6 * tokens, 300, dtype=torch.float16).requires_grad_()
    want, got = (run(weights, x, text) for run in (matmul_op.portable, region_matmul))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    grad = torch.randn_like(want)
    grads = (torch.autograd.grad(y, (weights, x), grad) for y in (got, want))
    torch.testing.assert_close(*grads, rtol=2e-2, atol=5e-2)


def test_products_of_transposed_matrices_and_strided_tokens_are_complete():
    weights, x = torch.randn(1, 6, 5, 3).mT, torch.randn(1, 40, 2 + 6 * 5).mT
    torch.testing.assert_close(region_matmul(weights, x, 2), matmul_op.portable(weights, x, 2))


@pytest.mark.parametrize("text", [0, 19])
def test_products_of_reordered_tokens_and_their_gradients_equal_the_portable_path(text):
    weights, x = torch.randn(2, 6, 3, 5).requires_grad_(), torch.randn(2, 70, 40).requires_grad_()
    order = torch.randperm(70)[: text + 6 * 5]
    want, got = (run(weights, x, text, order) for run in (matmul_op.portable, region_matmul))
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (weights, x), grad)
    torch.testing.assert_close(torch.autograd.grad(got, (weights, x), grad), expected)


GROUPS = [[(6, 16, 8)], [(1, 1, 1)], [(3, 33, 20), (2, 5, 3), (1, 8, 8)]]  # number of regions, rows, merged tokens


def update_inputs(groups, plans, dim, dtype, ordered):
    """Weights, x, merged tokens before and after, and the order; all tensors require gradients."""
    weights = [torch.randn(plans, *group, dtype=dtype).requires_grad_() for group in groups]
    tokens, merged = (sum(group[0] * group[side] for group in groups) for side in (1, 2))
    x, before, after = (
        torch.randn(2, length, dim, dtype=dtype).requires_grad_() for length in (tokens, merged, merged)
    )
    return weights, x, before, after, torch.randperm(tokens) if ordered else None


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_updates_and_their_gradients_equal_float64(groups, plans, ordered):
    weights, *rest, order = update_inputs(groups, plans, 150, torch.float16, ordered)
    change = (rest[2].double() - rest[1].double()).split([n * merged for n, _, merged in groups], 1)
    added = torch.cat(
        [
            torch.einsum("bnrt,bntc->bnrc", w.double().expand(2, -1, -1, -1), part.unflatten(1, (w.shape[1], -1)))
            .flatten(1, 2)
            for w, part in zip(weights, change, strict=True)
        ],
        1,
    )  # fmt: skip
    want = rest[0].double() + (added if order is None else added[:, order.argsort()])
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (*weights, *rest), grad)
    for run in (region_update, portable_update):
        got = run(weights, *rest, order)
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=2e-2)
        grads = torch.autograd.grad(got, (*weights, *rest), grad.half())
        torch.testing.assert_close(grads, expected, rtol=2e-2, atol=6e-2)


def test_updates_of_strided_tokens_are_complete():
    weights, order = torch.randn(1, 6, 3, 5).mT, torch.randperm(30)
    x, before, after = torch.randn(2, 40, 30).mT, torch.randn(2, 50, 40)[:, 7:25], torch.randn(2, 18, 80)[..., ::2]
    want = portable_update([weights], x, before, after, order)
    torch.testing.assert_close(region_update([weights], x, before, after, order), want)


@pytest.mark.parametrize("grid", [(8, 12), (18, 14), (9, 31)])
@pytest.mark.parametrize("keep", [0.25, 0.7])
def test_a_plan_is_the_same_with_kernels(monkeypatch, grid, keep):
    method = ToMA(keep=keep, tile=(4, 4))
    regions = method.regions((grid,))
    x = torch.randn(2, grid[0] * grid[1], 24)
    plan = method.plan(x[:, regions.order], regions)
    merged = plan.merge(x[:, regions.order])
    after = torch.randn_like(merged)
    want = x + plan.unmerge(after - merged)[:, regions.inverse]
    for op, kernel in (("region_matmul", region_matmul), ("region_update", region_update)):
        monkeypatch.setitem(dispatch._BACKENDS, op, [dispatch.Backend("triton", lambda *work: True, kernel)])
    torch.testing.assert_close(plan.merge(x, 0, regions.order), merged)
    torch.testing.assert_close(plan.update(x, merged, after, regions.order), want)
    ordered = plan.update(x[:, regions.order], merged, after)
    torch.testing.assert_close(ordered, want[:, regions.order])


@pytest.mark.slow
def test_all_pass_opcheck_and_state_what_they_support():
    torch.library.opcheck(facility_location, (torch.randn(2, 10, 10), 3))
    torch.library.opcheck(soft_assignment, (torch.randn(2, 10, 4), 3, 5.0))
    torch.library.opcheck(
        region_matmul, (torch.randn(1, 2, 3, 4).requires_grad_(), torch.randn(2, 9, 5).requires_grad_(), 1)
    )
    cuda = torch.device("cuda")
    assert assignment_kernel.supports(cuda, torch.bfloat16, 128)
    assert not assignment_kernel.supports(cuda, torch.bfloat16, 129)
    assert not assignment_kernel.supports(torch.device("cpu"), torch.float32, 16)
    assert picking_kernel.supports(cuda, torch.float32, 1024)
    assert not picking_kernel.supports(cuda, torch.float32, 1025)
    assert not picking_kernel.supports(cuda, torch.float64, 16)
    assert matmul_kernel.supports(cuda, torch.bfloat16, 64)
    assert not matmul_kernel.supports(cuda, torch.float32, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "plans", "ordered"),
    [([(2, 4, 3), (1, 2, 1)], 1, True), pytest.param([(2, 4, 3)], 2, False, marks=slow)],
)
def test_region_updates_pass_opcheck(groups, plans, ordered):
    torch.library.opcheck(region_update, update_inputs(groups, plans, 5, torch.float32, ordered))


def test_mismatched_regions_are_refused():
    with pytest.raises(ValueError, match="x has 8 tokens, not 1 text tokens and 2 regions of 4"):
        region_matmul(torch.randn(1, 2, 3, 4), torch.randn(1, 8, 5), 1)
    x, few = torch.randn(1, 8, 5), torch.randn(1, 5, 5)
    with pytest.raises(
        ValueError, match="for 8 tokens, 6 of them merged: got 8 tokens in x, 5 in before and 5 in after"
    ):
        region_update([torch.randn(1, 2, 4, 3)], x, few, few, None)
