"""Laws of CLEAR's pattern: it is the disc of the paper, and can be as sparse as HilbertA."""

import pytest
import tiny
import torch
from lab.quality.clear import Clear, radius_for, register
from oracle import dense_attention

import foveate
from foveate import HilbertA
from foveate.methods import METHODS
from foveate.methods.base import AttentionPlan, DenseFallback
from foveate.ops import dispatch
from foveate.ops.block_attention import block_attention
from foveate.pipelines.lora import pack_lora, read_lora

GRID, TEXT = (9, 12), 15


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(dispatch, "_BACKENDS", {op: [*known] for op, known in dispatch._BACKENDS.items()})
    monkeypatch.setitem(METHODS, "clear", Clear)  # is taken out again
    register()


@pytest.mark.parametrize("radius", [1, 2.5, 4])
def test_attention_is_masked_attention_under_the_disc(radius):
    plan = Clear(radius=radius).plan((GRID,), TEXT)
    assert isinstance(plan, AttentionPlan)
    place = torch.tensor([(row, column) for row in range(9) for column in range(12)]).double()
    mask = torch.ones(123, 123, dtype=torch.bool)
    mask[TEXT:, TEXT:] = torch.cdist(place, place) < radius
    q, k, v = (torch.randn(1, 2, 123, 8, dtype=torch.float64) for _ in range(3))
    got = block_attention(q, k, v, plan.tables[0])
    torch.testing.assert_close(got, dense_attention(q, k, v, mask)[0])


def test_a_radius_beyond_the_diagonal_is_the_dense_model():
    model, x = tiny.flux(), tiny.inputs(GRID)
    want = model(**x)[0]
    with foveate.apply(model, Clear(radius=16)) as run:
        torch.testing.assert_close(model(**x)[0], want)
        assert {row.method for row in run.summary().layers} == {"CLEAR r=16"}
    assert Clear(radius=16).plan((GRID,), TEXT).tables[0].sparsity() == 0


@pytest.mark.parametrize("grid", [(64, 64), (24, 40)])
def test_the_radius_gives_the_nearest_possible_sparsity(grid):
    wanted = HilbertA(tiles=16, centre=0.25).plan((grid,), 64).tables[0].sparsity()
    radius = radius_for(wanted, grid, 64)
    found, smaller, larger = (
        Clear(radius=r).plan((grid,), 64).tables[0].sparsity()
        for r in (radius, (radius**2 - 1) ** 0.5, (radius**2 + 2) ** 0.5)
    )
    assert smaller >= found >= larger
    assert abs(found - wanted) < 0.01


def test_reference_images_stay_dense_with_a_reason():
    with pytest.raises(DenseFallback, match="reference images"):
        Clear().plan((GRID, GRID), TEXT)


def attention_of(table, dtype=torch.float32, device="cpu"):
    """Output and gradients on fixed inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 123, 64).to(device, dtype).requires_grad_() for _ in range(3))
    out = block_attention(q, k, v, table)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


def test_registration_does_not_change_other_methods(request):
    table = HilbertA(tiles=2).plan((GRID,), TEXT).tables[0]
    before = attention_of(table)
    request.getfixturevalue("registered")
    for ours, theirs in zip(attention_of(table), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_computes_the_same(request, no_grad):
    table = Clear(radius=3).plan((GRID,), TEXT).tables[0]
    q, k, v = (torch.randn(2, 2, 123, 8, dtype=torch.float64) for _ in range(3))
    scatter = torch.randperm(123)
    want = block_attention(q, k, v, table, scatter=scatter)
    request.getfixturevalue("registered")
    torch.testing.assert_close(block_attention(q, k, v, table, scatter=scatter), want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own compiler
def test_flex_attention_has_the_same_gradients(request):
    table = Clear(radius=3).plan((GRID,), TEXT).tables[0]
    want = attention_of(table, dtype=torch.float64, device="cuda")
    request.getfixturevalue("registered")
    for ours, theirs in zip(attention_of(table, device="cuda"), want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("registered")
def test_a_lora_can_be_distilled_after_registration(tmp_path):
    (tmp_path / "lora").write_bytes(pack_lora({"layer.lora_A.weight": torch.ones(2, 2)}, Clear(radius=2.5), (64, 64)))
    assert read_lora(tmp_path / "lora").method == Clear(radius=2.5)
