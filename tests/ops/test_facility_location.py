"""Laws of facility location: greedy by its definition, near the best by brute force, the same however it is run."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_where_nothing_is_left_to_gain_tokens_come_by_index_and_at_once(monkeypatch):
    similarity = similarities(2, 9).clamp(min=0).repeat_interleave(12, 0).repeat_interleave(12, 1)
    want = facility_location(similarity, 100)
    monkeypatch.setattr(module, "LAZY_FROM", 1)
    assert torch.equal(facility_location(similarity, 100), want)
    looks, maximum = [], torch.maximum
    monkeypatch.setattr(torch, "maximum", lambda *pair: (looks.append(1), maximum(*pair))[1])
    facility_location(similarity, 100)
    assert len(looks) == 9  # of 100 picks


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
