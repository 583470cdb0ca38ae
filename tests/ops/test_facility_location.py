"""Laws of facility location: greedy by its definition, near the best by brute force, the same in every run."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.ops import facility_location as module
from foveate.ops.facility_location import best_similarity, facility_location, round_robin_greedy
from foveate.utils.progress import silent


def unit_rows(seed, *shape, dim=6, dtype=torch.float32):
    z = torch.randn(*shape, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return torch.nn.functional.normalize(z, dim=-1)


def similarities(seed, *shape):
    z = unit_rows(seed, *shape, dtype=torch.float64)
    return z @ z.mT


def value(similarity, picks):
    """The objective by its formula."""
    return similarity[:, list(picks)].max(1).values.sum().item()


# --- from matrices ---------------------------------------------------------------------------------------------------


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


def test_sets_of_a_batch_are_independent_and_a_smaller_budget_is_a_prefix():
    similarity = similarities(0, 3, 5, 40)
    picks = facility_location(similarity, 17)
    assert picks.shape == (3, 5, 17)
    for i in range(3):
        for j in range(5):
            assert torch.equal(facility_location(similarity[i, j], 17), picks[i, j])
    assert torch.equal(facility_location(similarity, 4), picks[..., :4])


@pytest.mark.parametrize("tokens", [2, 50, 300])
def test_lazy_picks_equal_the_picks_with_all_gains(tokens, monkeypatch):
    similarity = similarities(tokens, 2, tokens)
    want = facility_location(similarity, tokens // 2)
    monkeypatch.setattr(module, "LAZY_FROM", 1)
    assert torch.equal(facility_location(similarity, tokens // 2), want)


@pytest.mark.parametrize("lazy_from", [1, 1000])
def test_ties_of_gains_go_to_the_first(lazy_from, monkeypatch):
    monkeypatch.setattr(module, "LAZY_FROM", lazy_from)
    twins = similarities(1, 6).repeat_interleave(2, 0).repeat_interleave(2, 1)
    picks = facility_location(twins, 6)
    assert (picks % 2 == 0).all()
    assert facility_location(torch.ones(5, 5), 5).tolist() == [0, 1, 2, 3, 4]


def test_without_gains_tokens_are_picked_by_index_and_few_gains_are_computed(monkeypatch):
    similarity = similarities(2, 9).clamp(min=0).repeat_interleave(12, 0).repeat_interleave(12, 1)
    want = facility_location(similarity, 100)
    monkeypatch.setattr(module, "LAZY_FROM", 1)
    computed, similar = [], module._Matrix.similar

    def counted(matrix, subset):
        computed.append(len(subset))
        return similar(matrix, subset)

    monkeypatch.setattr(module._Matrix, "similar", counted)
    monkeypatch.setattr(module, "REFRESHED", 8)
    assert torch.equal(facility_location(similarity, 100), want)
    assert torch.equal(want[9:], torch.tensor([i for i in range(108) if i not in want[:9]])[:91])
    assert sum(computed) < 100 * 108 / 8


def test_similarity_need_not_be_symmetric():
    represents = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.9]])  # token 1 represents 0 and itself
    assert facility_location(represents, 2).tolist() == [1, 2]


def test_half_precision_is_compared_in_float32():
    similarity = similarities(3, 4, 20).half()
    assert torch.equal(facility_location(similarity, 9), facility_location(similarity.float(), 9))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("shape", "budget", "message"),
    [((4, 4), 0, "1 to 4 of 4 tokens, not 0"), ((4, 4), 5, "not 5"), ((3, 4), 2, r"got \[3, 4\]")],
)
def test_impossible_budgets_and_shapes_are_refused(shape, budget, message):
    with pytest.raises(ValueError, match=message):
        facility_location(torch.zeros(shape), budget)


# --- from embeddings, in turns ---------------------------------------------------------------------------------------


@settings(derandomize=True)  # of some thousand sets one has two gains at the edge of a tie
@given(seed=st.integers(0, 2**31), items=st.integers(1, 120), refreshed=st.sampled_from((1, 4, 32)))
def test_picks_from_embeddings_equal_picks_from_the_matrix(seed, items, refreshed):
    embeddings = unit_rows(seed, items)
    similarity = (embeddings.double() @ embeddings.double().mT).clamp(min=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REFRESHED", refreshed)
        patch.setattr(module, "CHUNK", 500)
        picked = round_robin_greedy(embeddings, embeddings, items * [0])
        best = best_similarity(embeddings, embeddings[picked.picks[:3]])
    assert torch.equal(picked.picks, facility_location(similarity, items))
    assert picked.gains.sum().item() == pytest.approx(similarity[:, picked.picks].amax(1).sum().item(), rel=1e-4)
    assert torch.allclose(best.double(), similarity[:, picked.picks[:3]].amax(1), atol=1e-5)


def greedy(similarity, turns, bonus, classes, room):
    """The definition of `round_robin_greedy`: every gain of every turn from the matrix in float64."""
    picks, room, bonus = [], room.clone(), bonus.double()
    covered = similarity.new_zeros(max(turns) + 1, len(similarity))
    for block in turns:
        gains = (similarity - covered[block, :, None]).clamp(min=0).sum(0) + bonus
        gains[(room[block] < 1)[classes]] = -torch.inf
        gains[picks] = -torch.inf
        best = gains.max()
        picks.append(int((gains >= best - module.TIE * best.abs()).int().argmax()))
        room[block, classes[picks[-1]]] -= 1
        covered[block] = covered[block].maximum(similarity[:, picks[-1]])
    return picks


@settings(derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    items=st.integers(1, 150),
    turns=st.lists(st.sampled_from([(0,), (1,), (0, 1), 9 * (0,), 12 * (1,)]), min_size=1, max_size=3),
    weight=st.sampled_from((0.0, 0.3)),
    dim=st.sampled_from((3, 40)),
)
def test_picks_follow_the_definition_with_separate_items_blocks_bonus_and_classes(seed, items, turns, weight, dim):
    turns = [block for run in turns for block in run]
    represented, candidates = unit_rows(seed, items, dim=dim), unit_rows(seed + 1, 97, dim=dim)
    candidates[60:70] = candidates[:10]
    similarity = (represented.double() @ candidates.double().mT).clamp(min=0)
    bonus, classes, room = (
        weight * similarity.amax(0).float(),
        torch.arange(97) % 5,
        torch.full((max(turns) + 1, 5), 8),
    )
    picked = round_robin_greedy(represented, candidates, turns, bonus=bonus, classes=classes, room=room)
    assert picked.picks.tolist() == greedy(similarity, turns, bonus, classes, room)


def test_a_round_makes_many_picks(monkeypatch):
    rounds, begin = [], module._LazyGreedy.begin
    monkeypatch.setattr(module._LazyGreedy, "begin", lambda self: rounds.append(begin(self)))
    rows = unit_rows(0, 1000, dim=64)
    round_robin_greedy(rows, rows, 500 * [0])  # later picks cover few other items
    assert len(rounds) < 500 / 5


def test_few_similarities_are_computed_and_never_many_at_a_time(monkeypatch):
    """The matrix of all pairs has 2,000 columns; computing all gains for each pick would compute it 100 times."""
    embeddings = torch.nn.functional.normalize(
        unit_rows(0, 40, dim=32).repeat(50, 1) + 0.5 * unit_rows(1, 2000, dim=32), dim=1
    )
    computed, similar, drops = [], module._Embeddings.similar, module._Embeddings.drops

    def counted_similar(similarity, subset):
        computed.append(len(subset))
        return similar(similarity, subset)

    def counted_drops(similarity, before, after):
        computed.append(int((after > before).sum()))
        return drops(similarity, before, after)

    monkeypatch.setattr(module, "CHUNK", 2000 * 64)
    monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(module._Embeddings, "similar", counted_similar)
    monkeypatch.setattr(module._Embeddings, "drops", counted_drops)
    with Peak() as peak:
        round_robin_greedy(embeddings, embeddings, 100 * [0])
    assert sum(computed) < 9 * 2000  # all columns once, and about 1 + 1/2 + ... + 1/100 of the rows
    assert peak.numbers <= 2000 * 64


class Peak(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_the_steps_of_a_round_never_wait_for_the_device(monkeypatch):
    """CUDA graphs replay them."""

    def drops(similarity, before, after):
        return ((similarity.candidates @ similarity.represented.T).clamp(before, after) - before).sum(1)

    monkeypatch.setattr(module._Embeddings, "drops", drops)
    embeddings, classes, room = unit_rows(0, 500, dim=64), torch.arange(500) % 3, torch.full((2, 3), 4)
    bonus, gains = torch.rand(500), module._first_gains(embeddings, embeddings, silent)
    similarity = module._Embeddings(embeddings, embeddings)
    turns = 5 * [0, 1, 1]
    greedy = module._LazyGreedy(similarity, turns, torch.zeros(2, 500), gains, bonus.clone(), classes, room)
    with Waits() as waits:
        rounds = len(list(greedy.run()))
        assert waits.number == rounds  # for the number of picks
        for step in (greedy.begin, greedy.extend, greedy.lower):  # steps after the last turn change nothing
            step()
    assert waits.number == rounds
    assert int(greedy.turn) == 15
    want = round_robin_greedy(embeddings, embeddings, turns, bonus=bonus, classes=classes, room=room)
    assert torch.equal(greedy.picks, want.picks)
    assert torch.equal(greedy.covered, want.covered)


class Waits(TorchDispatchMode):
    """Counts the ops for which the CPU would wait for the device: for a number, or for the shape of a result."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten.index.", "aten.index_put")):
            self.number += any(x is not None and x.dtype == torch.bool for x in args[1])
        self.number += name in ("aten._local_scalar_dense.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_a_user")
def test_impossible_turns_are_refused():
    embeddings, room = unit_rows(0, 200), torch.tensor([[1], [2]])
    with pytest.raises(ValueError, match="block 0 has no room for any remaining candidate in turn 3"):
        round_robin_greedy(embeddings, embeddings, [0, 1, 1, 0], classes=torch.zeros(200, dtype=torch.long), room=room)
    with pytest.raises(ValueError, match="1 to 3 turns for 3 candidates: 4"):
        round_robin_greedy(torch.eye(3), torch.eye(3), [0, 1, 0, 1])
