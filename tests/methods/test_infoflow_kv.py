"""Laws of recompute policies: number and choice of rows, order of chunks, scoring layers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import (
    EPIC,
    CacheBlend,
    FullPrefill,
    NoRecompute,
    ProphetKV,
    RandomRows,
)
from foveate.methods.recompute_policy import places

SPANS = (2, 6), (6, 9), (9, 20)


class ComposedCache:
    """A composed cache with given scores."""

    layers = 10

    def __init__(self, scores, spans=SPANS):
        self.scores, self.spans, self.calls = scores, spans, []

    def received(self, layers, norm, geometry):
        self.calls.append((layers, norm, geometry))
        return self.scores

    def kv_deviation(self, rank):
        self.calls.append(rank)
        return self.scores


@given(
    scores=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    recompute=st.floats(0, 1),
    exclude_first=st.booleans(),
    method=st.sampled_from([InfoFlowKV, CacheBlend, ProphetKV]),
)
def test_the_best_eligible_rows_are_chosen(scores, recompute, exclude_first, method):
    method = method(recompute=recompute, exclude_first=exclude_first)
    rows = method.rows(ComposedCache(torch.tensor(scores).double())).tolist()
    eligible = range(6 if exclude_first else 0, 20)
    count = min(max(1, math.floor(recompute * 20 + 1e-9)), len(eligible)) if recompute else 0
    assert rows == sorted(sorted(eligible, key=lambda row: (-scores[row], row))[:count])


@given(
    scores=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    recompute=st.floats(0, 1),
    boundary=st.integers(0, 12) | st.floats(0, 1, exclude_max=True),
    exclude_first=st.booleans(),
)
def test_boundary_rows_come_before_all_others(scores, recompute, boundary, exclude_first):
    method = InfoFlowKV(recompute=recompute, boundary=boundary, exclude_first=exclude_first)
    rows = method.rows(ComposedCache(torch.tensor(scores).double())).tolist()
    first = boundary if boundary >= 1 else math.floor(boundary * method.budget(SPANS) / 2)
    reserved = {row for start, stop in SPANS[1:] for row in range(start, stop) if row < start + first}
    eligible = range(6 if exclude_first else 0, 20)
    best = sorted(eligible, key=lambda row: (row not in reserved, -scores[row], row))
    assert rows == sorted(best[: method.budget(SPANS)])


def test_a_budget_of_zero_computes_no_scores():
    stale = ComposedCache(None)
    assert all(method(recompute=0).rows(stale).numel() == 0 for method in (InfoFlowKV, CacheBlend, RandomRows, EPIC))
    assert not stale.calls


def test_infoflow_scores_with_its_layers_norm_and_geometry():
    stale = ComposedCache(torch.rand(20))
    InfoFlowKV(scoring_layers=(3, 7), norm="l1", geometry="tl-tp").rows(stale)
    assert stale.calls == [((3, 7), "l1", "tl-tp")]


def test_prophet_kv_sums_the_attention_of_the_prompt_and_averages_all_layers():
    stale = ComposedCache(torch.rand(20))
    assert torch.equal(ProphetKV().rows(stale), InfoFlowKV(norm="l1", scoring_layers="0%-100%").rows(stale))
    assert stale.calls == 2 * [(tuple(range(10)), "l1", "global")]


@given(layers=st.integers(1, 100), low=st.integers(0, 99), width=st.integers(1, 100))
def test_a_band_of_depths_is_never_empty_and_within_the_model(layers, low, width):
    high = min(100, low + width)
    band = InfoFlowKV(scoring_layers=f"{low}%-{high}%").layers(layers)
    assert band
    assert band == tuple(
        layer for layer in range(layers) if 100 * (layer + 1) > low * layers and 100 * layer < high * layers
    )


def test_reordering_puts_the_richest_chunk_last():
    scores = torch.zeros(20)
    scores[[2, 3, 4, 6, 9, 10]] = 1.0  # three of four, one of three, two of eleven
    stale = ComposedCache(scores)
    assert InfoFlowKV(recompute=0.3, reorder=True).arrange(stale) == (2, 1, 0)
    assert stale.calls == [((5, 6, 7), "l2", "hl-tp")]
    assert InfoFlowKV(recompute=0.3, reorder=True, boundary=2).arrange(stale) == (2, 1, 0)
    assert InfoFlowKV(recompute=0.3).arrange(stale) == (0, 1, 2)


def test_epic_takes_the_first_rows_of_every_chunk_except_the_first():
    assert EPIC(recompute=0.25).rows(ComposedCache(None)).tolist() == [6, 7, 8, 9, 10]
    assert EPIC(recompute=0.2).rows(ComposedCache(None)).tolist() == [6, 7, 9, 10]
    assert EPIC(recompute=0.15, exclude_first=False).rows(ComposedCache(None)).tolist() == [0, 6, 9]


def test_random_rows_depend_on_the_seed():
    first, again, other = (
        RandomRows(recompute=0.3, seed=seed).rows(ComposedCache(None)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 6
    assert min(first) >= 6


def test_full_prefill_takes_all_rows_and_no_recompute_none():
    assert FullPrefill().rows(ComposedCache(None)).tolist() == list(range(20))
    assert NoRecompute().rows(ComposedCache(None)).tolist() == []


def test_geometries_keep_chunks_contiguous_and_the_prefix_first():
    for geometry in ("global", "hl-hp", "tl-tp", "hl-tp"):
        positions, prompt = places(geometry, SPANS)
        assert positions[:2].tolist() == [0, 1]
        assert int(positions.max()) < prompt
        for start, stop in SPANS:
            assert (positions[start:stop].diff() == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": 1.5}, "0 to 1, not 1.5"),
        ({"recompute": -0.1}, "0 to 1, not -0.1"),
        ({"norm": "max"}, "one of l2, l1, entropy, not 'max'"),
        ({"geometry": "local"}, "one of global, hl-hp, tl-tp, hl-tp, not 'local'"),
        ({"boundary": -1}, "below 1, or a whole number of rows of each chunk, not -1"),
        ({"boundary": math.inf}, "not inf"),
        ({"boundary": math.nan}, "not nan"),
        ({"boundary": 1.5}, "a whole number of rows of each chunk, not 1.5"),
        ({"scoring_layers": 3}, r"must be text or numbers in parentheses.*, not 3"),
        ({"scoring_layers": [1, 2]}, "not .1, 2."),
        ({"scoring_layers": (1.5,)}, "not .1.5,."),
        ({"scoring_layers": "60%"}, "not '60%'"),
        ({"scoring_layers": "70%-60%"}, "not '70%-60%'"),
        ({"scoring_layers": "70%-160%"}, "not '70%-160%'"),
    ],
)
def test_bad_options_are_refused_with_their_value(options, message, as_a_user):
    with pytest.raises(ValueError, match=message):
        InfoFlowKV(**options)


def test_missing_layers_and_unknown_ranks_are_refused(as_a_user):
    for layers in ((22, 40), (), (-1,)):
        with pytest.raises(ValueError, match="some of 0 to 39"):
            InfoFlowKV(scoring_layers=layers).layers(40)
    with pytest.raises(ValueError, match="one of v, k, not"):
        CacheBlend(rank="q")
