"""Laws of greedy selection from embeddings on a GPU: float64 gains, the picks of a CPU, linear memory."""

import pytest
import torch

from foveate import SubCP
from foveate.kernels.merging.coverage_drops import BACKENDS, coverage_drops
from foveate.ops import dispatch
from foveate.ops.facility_location import round_robin_greedy

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def unit(*shape, clusters=0):
    x = torch.randn(*shape)
    if clusters:
        x = torch.randn(clusters, shape[1])[torch.randint(clusters, shape[:1])] + 0.7 * x
    return torch.nn.functional.normalize(x, dim=-1)


@pytest.fixture(params=["portable", *BACKENDS])
def _backend(request, monkeypatch):
    here = [entry for entry in dispatch._BACKENDS["coverage_drops"] if entry.name == "portable"]
    if request.param in BACKENDS:
        here.append(dispatch.Backend(request.param, *BACKENDS[request.param]))
    monkeypatch.setitem(dispatch._BACKENDS, "coverage_drops", here)


@pytest.mark.parametrize(
    ("items", "candidates", "dim"), [(1, 1, 5), (129, 1000, 64), (5000, 3001, 100), (777, 4096, 384), (40, 20000, 768)]
)
@pytest.mark.parametrize("first", [True, False])
def test_drops_equal_the_definition(items, candidates, dim, first):
    x, y = unit(items, dim).to(CUDA), unit(candidates, dim).to(CUDA)
    before = torch.zeros(items, device=CUDA) if first else 0.1 * torch.rand(items, device=CUDA)
    more = 0.1 * torch.rand(items, device=CUDA) * (torch.arange(items, device=CUDA) % 3 > 0)  # some unchanged
    after = torch.full_like(before, torch.inf) if first else before + more
    want = ((y.double() @ x.double().T).clamp(before.double(), after.double()) - before.double()).sum(1)
    got = coverage_drops(x, y, before, after)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, coverage_drops(x, y, before, after))


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("clusters", [0, 50])
@pytest.mark.parametrize("turns", [60 * [0, 1, 1, 0], 240 * [0], 90 * [1] + 150 * [0]])
def test_picks_equal_those_of_a_cpu(clusters, turns):
    rows = unit(6000, 96, clusters=clusters)
    rows = torch.cat([rows, rows[:100]])  # with duplicates
    want, got = (round_robin_greedy(x, x, turns) for x in (rows, rows.to(CUDA)))
    assert torch.equal(got.picks.cpu(), want.picks)
    torch.testing.assert_close(got.gains.cpu(), want.gains, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_backend")
def test_picks_of_other_items_with_a_bonus_and_classes_equal_those_of_a_cpu():
    items, candidates, turns = unit(3001, 48), unit(2000, 48), 100 * [0] + 70 * [1]
    limits = {"bonus": torch.rand(2000), "classes": torch.arange(2000) % 7, "room": torch.full((2, 7), 15)}
    want = round_robin_greedy(items, candidates, turns, **limits)
    moved = {name: x.to(CUDA) for name, x in limits.items()}
    got = round_robin_greedy(items.to(CUDA), candidates.to(CUDA), turns, **moved)
    assert torch.equal(got.picks.cpu(), want.picks)
    torch.testing.assert_close(got.covered.cpu(), want.covered, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_backend")
def test_blocks_equal_those_of_a_cpu():
    rows, sub = unit(3000, 64, clusters=30), SubCP(blocks=8, block_size=16)
    assert sub.partition(rows.to(CUDA)).ids == sub.partition(rows).ids


@pytest.mark.usefixtures("_backend")
def test_memory_grows_with_the_pool_and_not_with_its_square():
    def peak(items):
        rows = unit(items, 64).to(CUDA)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        round_robin_greedy(rows, rows, 20 * [0])
        return torch.cuda.max_memory_allocated() - before

    assert peak(80000) < 3 * max(peak(40000), 2**28)  # a similarity matrix would take 26 GB
