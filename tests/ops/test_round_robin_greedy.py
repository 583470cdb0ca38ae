"""Laws of picking from embeddings: the picks of the matrix of similarities, without it, and without waiting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.ops import round_robin_greedy as module
from foveate.ops.facility_location import facility_location
from foveate.ops.round_robin_greedy import best_similarity, round_robin_greedy
from foveate.utils.progress import silent


def rows(seed, items, dim=6):
    z = torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(z, dim=-1)


@given(seed=st.integers(0, 2**31), items=st.integers(1, 120), looks=st.sampled_from((1, 4, 32)))
def test_from_embeddings_the_picks_are_those_from_the_matrix(seed, items, looks):
    embeddings = rows(seed, items)
    similarity = (embeddings.double() @ embeddings.double().mT).clamp(min=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOOKS", looks)
        patch.setattr(module, "AT_ONCE", 500)  # in parts
        picked = round_robin_greedy(embeddings, embeddings, items * [0])
        served = best_similarity(embeddings, embeddings[picked.picks[:3]])
    assert torch.equal(picked.picks, facility_location(similarity, items))
    assert picked.gains.sum().item() == pytest.approx(similarity[:, picked.picks].amax(1).sum().item(), rel=1e-4)
    assert torch.allclose(served.double(), similarity[:, picked.picks[:3]].amax(1), atol=1e-5)


def test_few_similarities_are_made_and_never_many_at_once(monkeypatch):
    """The matrix of all pairs has 2,000 columns; a naive look at all gains for each pick makes it 100 times."""
    embeddings = torch.nn.functional.normalize(rows(0, 40, 32).repeat(50, 1) + 0.5 * rows(1, 2000, 32), dim=1)
    made, gains, drops = [], module._gains, module._drops

    def counted(represented, candidates, before, after):
        made.append(int((after > before).sum()))
        return drops(represented, candidates, before, after)

    monkeypatch.setattr(module, "AT_ONCE", 2000 * 64)
    monkeypatch.setattr(module, "_gains", lambda *given: made.append(len(given[1])) or gains(*given))
    monkeypatch.setattr(
        module, "_drops", lambda *given: made.append(int((given[3] > given[2]).sum())) or drops(*given)
    )
    with Peak() as peak:
        round_robin_greedy(embeddings, embeddings, 100 * [0])
    assert sum(made) < 9 * 2000  # all columns once, and about 1 + 1/2 + ... + 1/100 of the rows
    assert peak.numbers <= 2000 * 64


class Peak(TorchDispatchMode):
    """The numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_a_round_waits_for_nothing(monkeypatch):
    """A GPU replays it."""

    def drops(represented, candidates, before, after):
        return ((candidates @ represented.T).clamp(before, after) - before).sum(1)

    monkeypatch.setattr(module, "_drops", drops)
    embeddings, classes, room = rows(0, 500, 64), torch.arange(500) % 3, torch.full((2, 3), 2)
    worth, gains = torch.rand(500), module._first_gains(embeddings, embeddings, silent)
    picking = module._Picking(embeddings, embeddings, 5 * [0, 1], gains, worth.clone(), classes, room)
    with Waits() as waits:
        for _ in range(40):
            picking.round()
    assert waits.number == 0
    want = round_robin_greedy(embeddings, embeddings, 5 * [0, 1], bonus=worth, classes=classes, room=room)
    assert int(picking.turn) == 10  # and rounds beyond the last change nothing
    assert torch.equal(picking.picks, want.picks)
    assert torch.equal(picking.covered, want.covered)


class Waits(TorchDispatchMode):
    """How often the CPU would need what a device computes: for a number, or for the shape of a result."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten.index.", "aten.index_put")):
            self.number += any(x is not None and x.dtype == torch.bool for x in args[1])
        self.number += name in ("aten._local_scalar_dense.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_a_user")
def test_a_block_without_room_is_refused():
    embeddings, room = rows(0, 200), torch.tensor([[1], [2]])
    with pytest.raises(ValueError, match="block 0 has no room for any candidate that is left in turn 3"):
        round_robin_greedy(embeddings, embeddings, [0, 1, 1, 0], classes=torch.zeros(200, dtype=torch.long), room=room)


@pytest.mark.usefixtures("as_a_user")
def test_more_turns_than_candidates_are_refused():
    with pytest.raises(ValueError, match="1 to 3 turns for 3 candidates: 4"):
        round_robin_greedy(torch.eye(3), torch.eye(3), [0, 1, 0, 1])
