"""Laws of facility location: greedy by its definition, near the best by brute force, the same however it is run."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.ops import facility_location as module
from foveate.ops.facility_location import facility_location


def similarities(seed, *shape, dim=6):
    z = torch.randn(*shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    z = torch.nn.functional.normalize(z, dim=-1)
    return z @ z.mT


def value(similarity, picks):
    """The objective, as its formula says."""
    return similarity[:, list(picks)].max(1).values.sum().item()


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 30), share=st.floats(0, 1))
def test_every_pick_adds_most_to_the_objective(seed, tokens, share):
    similarity = similarities(seed, tokens)
    budget = max(1, round(share * tokens))
    picks = facility_location(similarity, budget).tolist()
    assert len(set(picks)) == budget
    for k in range(budget):
        best = max(value(similarity, [*picks[:k], j]) for j in range(tokens) if j not in picks[:k])
        assert value(similarity, picks[: k + 1]) == pytest.approx(best, abs=1e-4)


@given(seed=st.integers(0, 2**31), budget=st.integers(1, 4))
def test_greedy_is_within_its_guarantee_of_the_best_subset(seed, budget):
    similarity = similarities(seed, 9).abs()
    best = max(value(similarity, subset) for subset in combinations(range(9), budget))
    assert value(similarity, facility_location(similarity, budget).tolist()) >= (1 - 1 / 2.718281828) * best


def test_sets_are_picked_from_one_by_one_and_order_of_a_smaller_budget_comes_first():
    similarity = similarities(0, 3, 5, 40)
    picks = facility_location(similarity, 17)
    assert picks.shape == (3, 5, 17)
    for i in range(3):
        for j in range(5):
            assert torch.equal(facility_location(similarity[i, j], 17), picks[i, j])
    assert torch.equal(facility_location(similarity, 4), picks[..., :4])


@pytest.mark.parametrize("tokens", [2, 50, 300])
def test_a_lazy_look_picks_the_same(tokens, monkeypatch):
    similarity = similarities(tokens, 2, tokens)
    want = facility_location(similarity, tokens // 2)
    monkeypatch.setattr(module, "LAZY_FROM", 1)
    assert torch.equal(facility_location(similarity, tokens // 2), want)


@pytest.mark.parametrize("lazy_from", [1, 1000])
def test_the_first_of_equals_is_taken(lazy_from, monkeypatch):
    monkeypatch.setattr(module, "LAZY_FROM", lazy_from)
    twins = similarities(1, 6).repeat_interleave(2, 0).repeat_interleave(2, 1)
    picks = facility_location(twins, 6)
    assert (picks % 2 == 0).all()
    assert facility_location(torch.ones(5, 5), 5).tolist() == [0, 1, 2, 3, 4]


def test_similarity_need_not_be_symmetric():
    serves = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.9]])  # token 1 serves 0 and itself
    assert facility_location(serves, 2).tolist() == [1, 2]


def test_half_precision_is_compared_in_float32():
    similarity = similarities(3, 4, 20).half()
    assert torch.equal(facility_location(similarity, 9), facility_location(similarity.float(), 9))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("shape", "budget", "message"),
    [((4, 4), 0, "1 to 4 of 4 tokens, not 0"), ((4, 4), 5, "not 5"), ((3, 4), 2, r"got \[3, 4\]")],
)
def test_what_cannot_be_picked_is_refused(shape, budget, message):
    with pytest.raises(ValueError, match=message):
        facility_location(torch.zeros(shape), budget)


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
        picked = module.pick_in_turns(embeddings, embeddings, items * [0])
        served = module.best_similarity(embeddings, embeddings[picked.picks[:3]])
    assert torch.equal(picked.picks, facility_location(similarity, items))
    assert picked.gains.sum().item() == pytest.approx(value(similarity, picked.picks), rel=1e-4)
    assert torch.allclose(served.double(), similarity[:, picked.picks[:3]].amax(1), atol=1e-5)


def test_few_similarities_are_made_and_never_many_at_once(monkeypatch):
    """The matrix of all pairs has 2,000 columns; a naive look at all gains for each pick makes it 100 times."""
    embeddings = torch.nn.functional.normalize(rows(0, 40, 32).repeat(50, 1) + 0.5 * rows(1, 2000, 32), dim=1)
    made, gains, drops = [], module._gains, module._drops
    monkeypatch.setattr(module, "AT_ONCE", 2000 * 64)
    monkeypatch.setattr(module, "_gains", lambda *given: made.append(len(given[1])) or gains(*given))
    monkeypatch.setattr(module, "_drops", lambda *given: made.append(len(given[0])) or drops(*given))
    with Peak() as peak:
        module.pick_in_turns(embeddings, embeddings, 100 * [0])
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


def test_a_pick_waits_for_the_device_three_times():
    """For what is served better, for whether to look again, and for the pick. Waiting leaves a GPU idle."""
    embeddings = rows(0, 500, 64)
    with Waits() as waits:
        module.pick_in_turns(embeddings, embeddings, 20 * [0, 1])
    assert waits.number == 3 * 40


class Waits(TorchDispatchMode):
    """How often the CPU would need what a device computes: for a number, or for the shape of a result."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = "aten.index" in str(func) and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.number += masked or str(func) in ("aten._local_scalar_dense.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_a_user")
def test_more_turns_than_candidates_are_refused():
    with pytest.raises(ValueError, match="1 to 3 turns for 3 candidates: 4"):
        module.pick_in_turns(torch.eye(3), torch.eye(3), [0, 1, 0, 1])
