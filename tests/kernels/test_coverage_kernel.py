"""Laws of the coverage kernel in Triton's interpreter: equal to the definition in float64, and the same picks."""

import pytest
import torch

from foveate.kernels.merging import coverage_drops as kernel
from foveate.kernels.merging.coverage_drops import coverage_drops
from foveate.kernels.merging.pick_refreshed import pick_refreshed
from foveate.ops import dispatch
from foveate.ops.facility_location import round_robin_greedy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernel")


@pytest.fixture(autouse=True)
def _float16(monkeypatch):
    """Triton's interpreter computes bfloat16 products wrongly."""
    monkeypatch.setattr(kernel, "HALF", torch.float16)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


@pytest.mark.parametrize(("items", "candidates", "dim"), [(1, 1, 5), (200, 130, 64), (128, 300, 100), (7, 129, 384)])
@pytest.mark.parametrize("first", [True, False])
def test_drops_equal_the_definition(items, candidates, dim, first):
    x, y = unit(items, dim), unit(candidates, dim)
    before = torch.zeros(items) if first else 0.3 * torch.rand(items)
    more = 0.2 * torch.rand(items) * (torch.arange(items) % 3 > 0)  # some items do not change
    after = torch.full((items,), torch.inf) if first else before + more
    want = ((y.double() @ x.double().T).clamp(before.double(), after.double()) - before.double()).sum(1)
    torch.testing.assert_close(coverage_drops(x, y, before, after).double(), want, rtol=1e-5, atol=1e-5)


def test_picks_equal_those_of_the_portable_path(monkeypatch):
    rows = torch.cat([unit(40, 24)] * 2)  # every row twice
    want = round_robin_greedy(rows, rows, 4 * [0, 1])
    here = [*dispatch._BACKENDS["coverage_drops"], dispatch.Backend("triton", lambda *work: True, coverage_drops)]
    monkeypatch.setitem(dispatch._BACKENDS, "coverage_drops", here)
    got = round_robin_greedy(rows, rows, 4 * [0, 1])
    assert torch.equal(got.picks, want.picks)
    torch.testing.assert_close(got.gains, want.gains, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("items", [1, 500, 1100])
@pytest.mark.parametrize("limited", [True, False])
def test_next_picks_equal_those_of_the_portable_path(items, limited, monkeypatch):
    rows, candidates, turns = unit(items, 24), unit(150, 24), 20 * [0] + 25 * [1]
    candidates[100:] = candidates[:50]
    limits = {"classes": torch.arange(150) % 3, "room": torch.full((2, 3), 9)} if limited else {}
    bonus = 0.1 * torch.rand(150)
    want = round_robin_greedy(rows, candidates, turns, bonus=bonus, **limits)
    calls = []

    def counted(*args):
        calls.append(args)
        pick_refreshed(*args)

    here = [dispatch.Backend("triton", lambda *work: True, counted)]
    monkeypatch.setitem(dispatch._BACKENDS, "pick_refreshed", here)
    got = round_robin_greedy(rows, candidates, turns, bonus=bonus, **limits)
    assert calls
    assert torch.equal(got.picks, want.picks)
    torch.testing.assert_close(got.gains, want.gains, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.covered, want.covered)


def test_it_passes_opcheck_and_does_not_support_cpus():
    nothing = torch.zeros(5)
    torch.library.opcheck(coverage_drops, (unit(5, 8), unit(9, 8), nothing, nothing + 1))
    assert not kernel.supports(torch.device("cpu"), torch.float32, 8)
