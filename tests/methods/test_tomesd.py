"""Laws of ToMeSD and ToFu: the kept tokens, the destinations of the others, and the merge."""

import pytest
import torch

from foveate.methods import ToFu, ToMeSD
from foveate.ops.merging import IndexMerge

GRID = (10, 13)


def planned(method, x, grids=(GRID,)):
    return method.plan(x, method.regions(grids))


def reference(x, method, grid=GRID):
    """(places, dst_index as raster tokens) of one sample, token by token."""
    rows, columns = grid
    here = [i for i in range(rows * columns) if not i // columns % 2 and not i % columns % 2]
    there = [i for i in range(rows * columns) if i not in here]
    z = torch.nn.functional.normalize(x, dim=-1)
    matches = sorted((max((float(z[i] @ z[j]), -j) for j in here), i) for i in there)
    alone = matches[: round(method.keep * rows * columns) - len(here)]
    goes = {i: i for i in here} | {i: i for _, i in alone} | {i: -j for (_, j), i in matches[len(alone) :]}
    return sorted(here + [i for _, i in alone]), [goes[i] for i in range(rows * columns)]


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.9])
def test_matches_follow_the_papers(keep):
    x = torch.randn(2, 130, 8, dtype=torch.float64)
    plan = planned(method := ToMeSD(keep=keep), x)
    for sample, places, dst_index in zip(x, plan.positions, plan.dst_index, strict=True):
        want_places, want_goes = reference(sample, method)
        assert sorted(places.tolist()) == want_places
        assert places[dst_index].tolist() == want_goes


def test_destinations_become_the_mean_of_their_tokens():
    x = torch.randn(2, 130, 8, dtype=torch.float64)
    plan = planned(ToMeSD(), x)
    merged = plan.merge(x)
    for i in range(merged.shape[1]):
        torch.testing.assert_close(merged[1, i], x[1, plan.dst_index[1] == i].mean(0))
    torch.testing.assert_close(plan.unmerge(merged)[1], merged[1, plan.dst_index[1]])


def test_fusion_prunes_in_early_blocks_and_keeps_norms_in_later_blocks():
    x = torch.randn(2, 130, 8, dtype=torch.float64)
    early, late = (planned(ToFu().at(depth), x) for depth in (0.2, 0.7))
    assert torch.equal(early.merge(x), x.take_along_dim(early.positions[..., None], 1))
    merged = late.merge(x)
    for i in range(merged.shape[1]):
        mine = x[0, late.dst_index[0] == i]
        want = torch.nn.functional.normalize(mine.mean(0), dim=0) * mine.norm(dim=-1).max()
        torch.testing.assert_close(merged[0, i], want)


@pytest.mark.parametrize("method", [ToMeSD(), ToMeSD(random=True), ToFu().at(0.0), ToFu().at(1.0)])
def test_constants_survive_and_references_stay_unmerged(method):
    constant = torch.ones(2, 130 + 42, 8)
    plan = planned(method, constant, (GRID, (6, 7)))
    torch.testing.assert_close(plan.merge(constant), constant[:, :107])
    torch.testing.assert_close(plan.unmerge(plan.merge(constant)), constant)
    x = torch.randn(2, 172, 8)
    torch.testing.assert_close(plan.unmerge(plan.merge(x))[:, 130:], x[:, 130:])


def test_half_precision_means_are_computed_in_float32():
    x = 1000 + torch.randn(1, 130, 8)
    plan = planned(ToMeSD(keep=0.3), x)
    assert isinstance(plan, IndexMerge)
    torch.testing.assert_close(plan.merge(x.half()).float(), plan.merge(x), rtol=1e-3, atol=1)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (ToMeSD, {"keep": 0.2}, r"use keep>=0.25 or larger cells, not keep=0.2"),
        (ToMeSD, {"cell": (0, 2)}, "two positive"),
        (ToFu, {"separation": 2.0}, "0 to 1, not 2.0"),
        (ToFu, {"keep": 0.0}, "keep is the fraction"),
    ],
)
def test_bad_settings_name_the_value_and_the_remedy(cls, options, says):
    with pytest.raises(ValueError, match=says):
        cls(**options)
