"""Laws of the kernel that lowers gains, in Triton's interpreter: float64 by the definition, and the same picks."""

import pytest
import torch

from foveate.kernels.merging import coverage_drops as kernel
from foveate.kernels.merging.coverage_drops import coverage_drops
from foveate.ops import dispatch
from foveate.ops.facility_location import round_robin_greedy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernel")


@pytest.fixture(autouse=True)
def _halves_that_the_interpreter_multiplies(monkeypatch):
    """Not bfloat16: the interpreter's is wrong."""
    monkeypatch.setattr(kernel, "HALF", torch.float16)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


@pytest.mark.parametrize(("items", "candidates", "dim"), [(1, 1, 5), (200, 130, 64), (128, 300, 100), (7, 129, 384)])
@pytest.mark.parametrize("first", [True, False])
def test_drops_are_those_of_the_definition(items, candidates, dim, first):
    x, y = unit(items, dim), unit(candidates, dim)
    before = torch.zeros(items) if first else 0.3 * torch.rand(items)
    more = 0.2 * torch.rand(items) * (torch.arange(items) % 3 > 0)  # none for some
    after = torch.full((items,), torch.inf) if first else before + more
    want = ((y.double() @ x.double().T).clamp(before.double(), after.double()) - before.double()).sum(1)
    torch.testing.assert_close(coverage_drops(x, y, before, after).double(), want, rtol=1e-5, atol=1e-5)


def test_picks_are_those_without_it(monkeypatch):
    rows = torch.cat([unit(150, 24), unit(10, 24)] * 2)  # and twins
    want = round_robin_greedy(rows, rows, 20 * [0, 1])
    here = [*dispatch._BACKENDS["coverage_drops"], dispatch.Backend("triton", lambda *work: True, coverage_drops)]
    monkeypatch.setitem(dispatch._BACKENDS, "coverage_drops", here)
    got = round_robin_greedy(rows, rows, 20 * [0, 1])
    assert torch.equal(got.picks, want.picks)
    torch.testing.assert_close(got.gains, want.gains, rtol=1e-5, atol=1e-5)


def test_it_passes_opcheck_and_says_what_it_takes():
    nothing = torch.zeros(5)
    torch.library.opcheck(coverage_drops, (unit(5, 8), unit(9, 8), nothing, nothing + 1))
    assert not kernel.takes(torch.device("cpu"), torch.float32, 8)
