"""Laws of ToMA: its algebra, its regions, and its exact cases."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import HilbertA, ToMA
from foveate.methods import method_from_text
from foveate.methods.base import DenseFallback

GRIDS = [(64, 64), (45, 80), (52, 76), (47, 53), (13, 7), (4, 4)]


def smooth(height, width, dim=16, batch=2, dtype=torch.float64):
    """Features that change slowly over the image, with some noise."""
    rows, columns = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij")
    waves = torch.stack([(a * rows + b * columns).sin() for a, b in itertools.product(range(1, 5), repeat=2)], -1)
    x = waves.flatten(0, 1)[:, :dim].expand(batch, -1, -1) + 0.1 * torch.randn(batch, height * width, dim)
    return x.to(dtype)


def planned(method, grid, x):
    regions = method.regions((grid,))
    x = x[:, regions.order]
    return regions, x, method.plan(x, regions)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("tile", [(4, 4), (3, 2)])
def test_regions_cover_every_token_once_in_at_most_four_shapes(grid, tile):
    regions = ToMA(tile=tile).regions((grid,))
    cells = grid[0] * grid[1]
    assert torch.equal(regions.order.sort().values, torch.arange(cells))
    assert torch.equal(regions.order[regions.inverse], torch.arange(cells))
    assert sum(regions.lengths) == cells
    assert len(regions.groups) <= 4
    first = 0
    for group in regions.groups:
        for _ in range(group.number):
            rows, columns = torch.unravel_index(regions.order[first : first + group.tokens], grid)
            assert int(rows.max() - rows.min()) + 1 == group.shape[0]
            assert int(columns.max() - columns.min()) + 1 == group.shape[1]
            assert abs(group.shape[0] - tile[0]) <= tile[0] / 2 or grid[0] < 2 * tile[0]
            first += group.tokens


@pytest.mark.parametrize(("tile", "window"), [((8, 8), (4, 4, 4)), ((2, 6, 3), (2, 6, 3))])
def test_regions_of_a_video_are_windows_of_space_and_time(tile, window):
    grid = (5, 12, 9)
    (tiles,) = ToMA(tile=tile).regions((grid,)).tile_maps
    for region in tiles.unique():
        places = (tiles == region).nonzero()
        sides = places.max(0).values - places.min(0).values + 1
        assert len(places) == sides.prod()
        assert all(abs(side - size) <= size / 2 for side, size in zip(sides.tolist(), window, strict=True))
    assert ToMA(tile=tile).regions(((1, 12, 9),)).tile_maps[0].shape == (1, 12, 9)


def test_the_region_map_equals_the_merged_regions():
    for regions in (
        ToMA(tile=(4, 4)).regions(((13, 7), (8, 8))),
        ToMA().regions_along(HilbertA(tiles=1).plan(((13, 7),), 5), (13, 7)),
    ):
        (regions_of,) = regions.tile_maps
        tokens = regions.order[regions.order < 13 * 7]
        first = 0
        for group in regions.groups:
            for _ in range(group.number):
                mine = tokens[first : first + group.tokens]
                assert len(regions_of.flatten()[mine].unique()) <= 1
                first += group.tokens
        assert regions_of.unique().numel() == sum(group.number for group in regions.groups if group.merges)


def test_the_kept_tokens_of_an_odd_grid_are_counted():
    regions = ToMA(tile=(4, 4)).regions(((47, 53),))
    assert (regions.kept, len(regions.order)) == (1246, 2491)


@pytest.mark.parametrize("options", [{}, {"weights": "hard"}, {"keep": 0.25}, {"keep": 0.9}])
@pytest.mark.parametrize("grid", [(16, 20), (13, 7)])
def test_weights_sum_to_one_and_constants_survive(options, grid):
    _, x, merge = planned(ToMA(tile=(4, 4), **options), grid, smooth(*grid))
    for gather, spread in zip(merge.gather, merge.spread, strict=True):
        torch.testing.assert_close(gather.sum(-1), torch.ones_like(gather.sum(-1)))
        torch.testing.assert_close(spread.sum(-2), torch.ones_like(spread.sum(-2)))
    constant = x[:, :1].expand_as(x)
    merged = merge.merge(constant)
    torch.testing.assert_close(merged, constant[:, : merged.shape[1]])
    torch.testing.assert_close(merge.unmerge(merged), constant)


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_destinations_are_places_of_different_tokens_that_merge_into_themselves(keep):
    regions, x, merge = planned(ToMA(keep=keep, weights="hard"), (16, 20), smooth(16, 20))
    assert merge.positions.shape == (2, regions.kept)
    assert all(len(set(places.tolist())) == regions.kept for places in merge.positions)
    rope = torch.arange(320.0)[:, None]
    torch.testing.assert_close(merge.rope(rope[None])[..., 0], merge.positions.float())
    dots = (merge.unmerge(merge.merge(x)) * x).sum(-1)
    assert (dots.gather(1, merge.positions) > 0).all()


def test_the_transpose_of_hard_weights_is_the_pseudo_inverse():
    _, _, merge = planned(ToMA(weights="hard"), (16, 20), smooth(16, 20))
    torch.testing.assert_close(merge.spread[0].mT, torch.linalg.pinv(merge.gather[0]))


def test_groups_of_identical_tokens_lose_nothing():
    x = torch.randn(1, 4, 4, 8).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)  # 2 x 2 equal tokens
    _, x, merge = planned(ToMA(keep=0.25), (8, 8), x)
    torch.testing.assert_close(merge.unmerge(merge.merge(x)), x, rtol=1e-4, atol=1e-5)


def test_the_plan_of_a_sample_does_not_depend_on_the_others():
    x = smooth(16, 20, batch=4) + 0.3 * torch.randn(4, 320, 16)
    regions, x, merge = planned(ToMA(), (16, 20), x)
    alone = ToMA().plan(x[2:3], regions)
    assert torch.equal(alone.positions, merge.positions[2:3])
    torch.testing.assert_close(alone.merge(x[2:3]), merge.merge(x)[2:3])


def test_new_weights_for_old_destinations():
    method = ToMA()
    regions, x, merge = planned(method, (16, 20), smooth(16, 20))
    later = method.plan(x + 0.1 * torch.randn_like(x), regions, merge.chosen)
    assert torch.equal(later.positions, merge.positions)
    assert not torch.equal(later.gather[0], merge.gather[0])


@pytest.mark.parametrize("merge_reference", [False, True])
def test_an_update_adds_to_each_token_what_its_destinations_changed_by(merge_reference):
    method = ToMA(tile=(4, 4), merge_reference=merge_reference)
    regions = method.regions(((12, 16), (8, 12)))
    x = torch.randn(2, len(regions.order), 16)
    merge = method.plan(x[:, regions.order], regions)
    before = merge.merge(x, order=regions.order)
    after = torch.randn_like(before)
    want = x + merge.unmerge(after - before)[:, regions.inverse]
    torch.testing.assert_close(merge.update(x, before, after, regions.order), want)
    torch.testing.assert_close(merge.update(x[:, regions.order], before, after), want[:, regions.order])


def test_reference_images_merge_only_with_merge_reference():
    x = smooth(24, 20)  # two images of 16 and 8 rows
    grids = (16, 20), (8, 20)
    regions = ToMA().regions(grids)
    assert regions.kept == 160 + 160
    merge = ToMA().plan(x[:, regions.order], regions)
    assert torch.equal(merge.merge(x[:, regions.order])[:, 160:], x[:, 320:])
    assert ToMA(merge_reference=True).regions(grids).kept == 160 + 80


@given(tiles=st.sampled_from([1, 2, 4, 5]), text=st.sampled_from([0, 16, 77]), height=st.sampled_from([16, 24, 29]))
def test_merged_patterns_along_a_hilbert_curve_equal_the_pattern_of_the_destinations(tiles, text, height):
    plan = HilbertA(tiles=tiles).plan(((height, 20),), text)
    method = ToMA(weights="hard")
    regions = method.regions_along(plan, (height, 20))
    assert sum(regions.lengths) == sum(length for _, length in plan.segments) == height * 20
    merge = method.plan(torch.randn(1, height * 20, 8), regions)
    tokens = torch.cat([torch.arange(text), text + merge.positions[0]])
    for table in plan.tables:
        merged = regions.merged(table, text)
        assert merged.query_tokens == len(tokens)
        assert torch.equal(merged.to_dense(), table.to_dense()[tokens][:, tokens])


@pytest.mark.parametrize(("side", "tiles", "tile", "longest"), [
    (64, 16, (8, 8), 64), (64, 16, (4, 4), 16), (32, 4, (8, 8), 64), (32, 16, (8, 8), 16), (32, 16, (3, 16), 16),
])  # fmt: skip
def test_the_longest_runs_along_a_curve_that_cross_no_border_merge(side, tiles, tile, longest):
    plan = HilbertA(tiles=tiles).plan(((side, side),), 77)
    regions = ToMA(tile=tile).regions_along(plan, (side, side))
    assert max(group.tokens for group in regions.groups) == longest
    for table in plan.tables:
        regions.merged(table, 77)


@pytest.mark.parametrize(("options", "says"), [
    ({"keep": 0.0}, "keep is the fraction"), ({"keep": 1.5}, "1.5"), ({"tile": (0, 4)}, "positive whole"),
    ({"tile": (4,)}, "positive whole"), ({"weights": "best"}, "soft, hard"), ({"dst_every": 0}, "1 or more"),
    ({"dst_every": 10, "weights_every": 4}, "does not divide"), ({"skip": -1}, "0 or more"),
    ({"granularity": "layer"}, "one of module, block"),
    ({"granularity": "block", "merge_mlp": False}, "merges whole blocks"),
])  # fmt: skip
@pytest.mark.usefixtures("as_a_user")
def test_bad_settings_name_the_value_and_the_remedy(options, says):
    with pytest.raises(ValueError, match=says):
        ToMA(**options)


def test_an_image_smaller_than_a_tile_stays_dense():
    with pytest.raises(DenseFallback, match="fewer than a tile"):
        ToMA().regions(((3, 9),))


@pytest.mark.usefixtures("as_a_user")
def test_booleans_are_read_in_common_spellings():
    for text, want in {"true": True, "False": False, "false": False}.items():
        assert method_from_text("toma", {"merge_reference": text}) == ToMA(merge_reference=want)
    assert method_from_text("toma", {"granularity": "module", "merge_mlp": "none"}) == ToMA(granularity="module")
    assert ToMA(tile=[4, 4]) == ToMA(tile=(4, 4)), "lists come from JSON"
    assert hash(ToMA(tile=[4, 4]))
    with pytest.raises(ValueError, match="merge_reference must be true or false, not 'maybe'"):
        method_from_text("toma", {"merge_reference": "maybe"})
