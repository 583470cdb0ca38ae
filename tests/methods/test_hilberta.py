"""Laws of HilbertA's pattern, from the formulas of the paper."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention

from foveate import HilbertA
from foveate.methods.base import DenseFallback
from foveate.ops.block_attention import block_attention
from foveate.ops.curves import hilbert_order, hilbert_order_3d, inverse_order

sides = st.integers(1, 40)


def raster_mask(plan, phase, text):
    """Pattern of the plan over [text | image in raster order]."""
    into = torch.cat([torch.arange(text), text + inverse_order(plan.orders[phase])])
    return plan.tables[phase].to_dense()[into][:, into]


def formula_tiles(height, width, tiles, phase, text, period=4):
    """Tiles by the paper's formula: -1 for text and centre, otherwise floor((i - shift) / tile) of curve step i."""
    cells = height * width
    i = inverse_order(hilbert_order(height, width))
    tile = torch.div(i - phase * cells // (tiles * period), cells // tiles, rounding_mode="floor") % tiles
    rows, columns = torch.unravel_index(torch.arange(cells), (height, width))
    top, left = (height - height // 4) // 2, (width - width // 4) // 2
    centre = (rows >= top) & (rows < top + height // 4) & (columns >= left) & (columns < left + width // 4)
    return torch.cat([torch.full((text,), -1), tile.masked_fill(centre, -1)])


def tile_mask(tile):
    shared = tile == -1
    return shared[:, None] | shared | (tile[:, None] == tile)


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("tiles", [4, 16])
@pytest.mark.parametrize("phase", range(4))
def test_mask_on_the_papers_grids_is_the_papers_formula(side, tiles, phase):
    plan = HilbertA(tiles=tiles, slide="curve").plan(((side, side),), 20)
    tile = formula_tiles(side, side, tiles, phase, 20)
    shared = int((tile == -1).sum())
    local = int(tile[tile >= 0].bincount().square().sum())
    assert plan.tables[phase].pairs() == shared * (2 * len(tile) - shared) + local
    if side == 64:  # the mask of the larger side has 268 million entries
        assert torch.equal(raster_mask(plan, phase, 20), tile_mask(tile))


@pytest.mark.parametrize(("side", "multiple"), [(64, 64), (128, 256)])
@pytest.mark.parametrize("tiles", [4, 16])
def test_tile_borders_on_the_papers_grids_are_whole_blocks(side, multiple, tiles):
    plan = HilbertA(tiles=tiles, slide="curve").plan(((side, side),), 0, block=multiple)
    for table in plan.tables:
        assert set(table.query_starts.diff().tolist()) <= {0, multiple}


@pytest.mark.parametrize(
    ("side", "tiles", "true", "nominal", "gflops", "bound"),
    [
        (64, 4, 0.521, 0.75, 125, 2.09),
        (64, 16, 0.650, 0.9375, 91, 2.86),
        (128, 4, 0.619, 0.75, 1335, 2.63),
        (128, 16, 0.774, 0.9375, 794, 4.42),
    ],
)
def test_true_sparsity_is_the_published_table(side, tiles, true, nominal, gflops, bound):
    plan = HilbertA(tiles=tiles, slide="curve").plan(((side, side),), 512)
    sparsity = sum(table.sparsity() for table in plan.tables) / 4
    assert sparsity == pytest.approx(true, abs=6e-4)  # the mean over the phases, as printed
    assert plan.nominal_sparsity == nominal
    assert sum(table.flops(24, 128) for table in plan.tables) / 4e9 == pytest.approx(gflops, abs=0.6)
    assert 1 / (1 - sparsity) == pytest.approx(bound, abs=0.01)


@given(
    height=sides,
    width=sides,
    text=st.integers(0, 80),
    centre=st.sampled_from([0, 0.25, 0.4, 1.0]),
    phase=st.integers(0, 3),
)
def test_one_tile_is_dense_for_every_grid_phase_centre_and_text(height, width, text, centre, phase):
    plan = HilbertA(tiles=1, centre=centre).plan(((height, width),), text)
    assert plan.tables[phase].to_dense().all()


def test_a_centre_that_covers_everything_is_dense():
    for table in HilbertA(tiles=4, centre=1.0).plan(((16, 20),), 5).tables:
        assert table.to_dense().all()


@given(height=st.integers(12, 40), width=st.integers(12, 40), text=st.integers(0, 70), data=st.data())
def test_any_grid_keeps_the_laws_of_the_pattern(height, width, text, data):
    tiles = data.draw(st.integers(1, height * width // 32))
    plan = HilbertA(tiles=tiles, slide="curve").plan(((height, width),), text)
    cells = height * width
    assert torch.equal(plan.orders[0].sort().values, torch.arange(cells))
    step = inverse_order(hilbert_order(height, width))
    for phase, (table, tile_map) in enumerate(zip(plan.tables, plan.tile_maps, strict=True)):
        mask = raster_mask(plan, phase, text)
        assert torch.equal(mask, tile_mask(torch.cat([torch.full((text,), -1), tile_map.flatten()])))
        assert mask.diagonal().all()
        assert table.pairs() == mask.sum()
        # every tile is one run of the curve, except the tile that wraps around its end
        along = tile_map.flatten()[step.argsort()]
        along = along[along >= 0]
        changes = int((along.diff() != 0).sum())
        assert changes <= len(along.unique())


def test_snapping_moves_borders_by_at_most_half_a_step():
    exact = HilbertA(tiles=7, centre=0, align=1).plan(((30, 50),), 0)
    snapped = HilbertA(tiles=7, centre=0).plan(((30, 50),), 0)
    for a, b in zip(exact.tables, snapped.tables, strict=True):
        borders = [{int(s) for s in t.query_starts if int(s) % 64 or t is b} for t in (a, b)]
        assert all(min(abs(x - y) for y in borders[1]) <= 32 for x in borders[0])
    cuts = exact.tile_maps[0].flatten()[exact.orders[0]].diff().nonzero().flatten() + 1
    assert cuts.tolist() == [j * 1500 // 7 for j in range(1, 7)]


def neighbours_apart(grid, **options):
    """Fraction of the pairs of neighbouring tokens without attention to each other in any layer."""
    maps, apart, pairs = HilbertA(**options).plan((grid,), 0).tile_maps, 0, 0
    for axis, side in enumerate(grid, 1):
        a, b = maps.narrow(axis, 0, side - 1), maps.narrow(axis, 1, side - 1)
        alone = ~((a == b) | (a == -1) | (b == -1)).any(0)
        apart, pairs = apart + int(alone.sum()), pairs + alone.numel()
    return apart / pairs


@pytest.mark.parametrize("tiles", [4, 16])
@pytest.mark.parametrize(
    ("grid", "most"),
    [((32, 32), 0), ((64, 64), 0), ((45, 80), 0), ((96, 64), 0), ((21, 45, 80), 0), ((27, 41), 0.003)],
)
def test_neighbours_share_a_tile_in_some_layer_if_the_tiles_slide_diagonally(grid, most, tiles):
    assert neighbours_apart(grid, tiles=tiles, slide="diagonal", align=1) <= most


@pytest.mark.parametrize("tiles", [4, 16])
@pytest.mark.parametrize("grid", [(32, 32), (64, 64), (45, 80), (21, 45, 80)])
def test_sliding_diagonally_costs_as_much_as_sliding_along_the_curve(grid, tiles):
    pairs = [
        sum(table.pairs() for table in HilbertA(tiles=tiles, slide=slide).plan((grid,), 512).tables)
        for slide in ("curve", "diagonal")
    ]
    assert pairs[1] == pytest.approx(pairs[0], rel=0.005)


def test_the_documented_numbers_of_separated_neighbours_are_right():
    page = (Path(__file__).parents[2] / "docs" / "hilberta.md").read_text()
    for grid in (32, 32), (64, 64), (128, 128), (45, 80), (21, 45, 80):
        apart = (neighbours_apart(grid, tiles=16, slide=slide) for slide in ("curve", "diagonal"))
        assert f"| {' x '.join(map(str, grid))} | {' | '.join(f'{100 * part:.1f} %' for part in apart)} |\n" in page


@given(height=st.integers(12, 40), width=st.integers(12, 40), text=st.integers(0, 70), data=st.data())
def test_tiles_that_slide_diagonally_are_shifts_of_the_first_phase(height, width, text, data):
    tiles = data.draw(st.integers(1, height * width // 32))
    plan = HilbertA(tiles=tiles, slide="diagonal", centre=0, align=1).plan(((height, width),), text)
    for phase, tile_map in enumerate(plan.tile_maps):
        shifts = [round(side * phase / 4 / tiles ** (1 / 2)) for side in (height, width)]
        assert torch.equal(tile_map, plan.tile_maps[0].roll(shifts, (0, 1)))
        tile = torch.cat([torch.full((text,), -1), tile_map.flatten()])
        assert torch.equal(raster_mask(plan, phase, text), tile_mask(tile))


def test_auto_slides_diagonally_but_along_the_curve_with_merging_and_for_bands():
    method, bands = HilbertA(tiles=4), HilbertA(tiles=4, curve="raster")
    for same, alone in ((method, "diagonal"), (bands, "curve")):
        assert same.chosen_for((32, 40)) == replace(same, slide=alone)
        assert (same.moved((32, 40), 4, 1) == (0, 0)) == (alone == "curve")
    for same, slide in ((method, "diagonal"), (method.for_use_with_merging(), "curve"), (bands, "curve")):
        plan, want = (one.plan(((32, 40),), 5) for one in (same, replace(same, slide=slide)))
        assert torch.equal(plan.tile_maps, want.tile_maps)
        assert all(map(torch.equal, plan.orders, want.orders))


@pytest.mark.parametrize("tiles", [4, 16])
def test_receptive_field_grows_by_one_tile_a_layer_and_covers_all_after_t_layers(tiles):
    plan = HilbertA(tiles=tiles, centre=0, slide="curve").plan(((32, 32),), 0)
    masks = [table.to_dense().float() for table in plan.tables]
    reach = torch.eye(1024)
    for layer in range(tiles):
        reach = (masks[layer % 4] @ reach).clamp(max=1)
        assert reach.sum(1).max() == 1024 // tiles * min(tiles, layer + 1)
    assert reach.all()


@given(
    sizes=st.lists(st.tuples(st.integers(8, 24), st.integers(8, 24)), min_size=2, max_size=3), text=st.integers(0, 40)
)
def test_global_references_attend_to_everything_and_everything_attends_to_them(sizes, text):
    plan = HilbertA(tiles=2, align=1).plan(tuple(sizes), text)
    mask = raster_mask(plan, 1, text)
    first = text + sizes[0][0] * sizes[0][1]
    assert mask[first:].all()
    assert mask[:, first:].all()
    alone = HilbertA(tiles=2, align=1).plan((sizes[0],), text)
    assert torch.equal(mask[:first, :first], raster_mask(alone, 1, text))


def test_tiled_references_share_tiles_with_the_image():
    method = HilbertA(tiles=4, reference="tiled", centre=0)
    plan = method.plan(((16, 16), (16, 16)), 10)
    mask = raster_mask(plan, 2, 10)
    tile = plan.tile_maps[2].flatten()
    same = tile[:, None] == tile
    for rows in (slice(10, 266), slice(266, 522)):
        for columns in (slice(10, 266), slice(266, 522)):
            assert torch.equal(mask[rows, columns], same)
    assert mask[:10].all()


@pytest.mark.parametrize(
    ("grid", "tiles"), [((64, 64), 16), ((63, 64), 8), ((32, 32), 4), ((16, 32), 2), ((128, 128), 16)]
)
def test_auto_takes_the_most_tiles_with_256_tokens_each(grid, tiles):
    assert HilbertA().tiles_for(grid) == tiles


def test_auto_leaves_small_images_dense_with_the_reason():
    with pytest.raises(DenseFallback, match="16 x 31 image tokens are too few"):
        HilbertA().plan(((16, 31),), 0)


def box_tiles(frames, height, width, tiles, phase, period=4):
    """Tile of each token of a video by the formula, -1 in the central box."""
    cells = frames * height * width
    cuts = (torch.arange(tiles) * cells // tiles + phase * cells // (tiles * period)) % cells
    rank = inverse_order(hilbert_order_3d(frames, height, width))
    tile = torch.bucketize(rank, cuts.sort().values, right=True) % tiles
    inside = torch.ones(cells, dtype=torch.bool)
    grid = frames, height, width
    for cell, side in zip(torch.unravel_index(torch.arange(cells), grid), grid, strict=True):
        length = max(1, round(side / 4))
        inside &= (cell >= (side - length) // 2) & (cell < (side - length) // 2 + length)
    return tile.masked_fill(inside, -1)


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize(("grid", "tiles"), [((5, 12, 9), 4), ((21, 45, 80), 16)])
def test_the_tiles_of_a_video_are_runs_of_the_curve_in_three_dimensions(grid, tiles, phase):
    tile = torch.cat([torch.full((11,), -1), box_tiles(*grid, tiles, phase)])
    plan = HilbertA(tiles=tiles, align=1, slide="curve").plan((grid,), 11)
    counts, shared = tile[tile >= 0].bincount(), int((tile == -1).sum())
    assert plan.tables[phase].pairs() == shared * (2 * len(tile) - shared) + int(counts.square().sum())
    assert plan.tile_maps.shape == (4, *grid)
    if len(tile) < 1000:
        assert torch.equal(raster_mask(plan, phase, 11), tile_mask(tile))


@pytest.mark.parametrize("grid", [(5, 12, 9), (21, 45, 80)])
def test_the_tiles_of_a_video_are_connected(grid):
    for tile_map in HilbertA(tiles=16 if grid[0] > 5 else 4, centre=0).plan((grid,), 0).tile_maps[:1]:
        for tile in tile_map.unique():
            inside = (tile_map == tile)[None, None].float()
            reached = torch.zeros_like(inside).flatten()
            reached[inside.flatten().argmax()] = 1
            reached, before = reached.view_as(inside), 0
            while (count := int(reached.sum())) > before:
                before, reached = count, torch.nn.functional.max_pool3d(reached, 3, 1, 1) * inside
            assert count == inside.sum()


@pytest.mark.slow
def test_the_documented_costs_of_a_central_box_and_a_global_first_frame_are_right():
    grid, page = (21, 45, 80), (Path(__file__).parents[2] / "docs" / "hilberta.md").read_text()
    for name, centre, first in (
        ("`centre=0`", 0.0, 0),
        ("`centre=0.25`", 0.25, 0),
        ("`centre=0.4`", 0.4, 0),
        ("first", 0.0, 1),
    ):
        plan = HilbertA(tiles=16, centre=centre, slide="curve").plan((grid,), 0)
        tiles = plan.tile_maps.clone()
        tiles[:, :first] = -1  # global
        tokens, shared = prod(grid), int((tiles[0] == -1).sum())
        pairs = [2 * shared * tokens - shared**2 + sum(int((at == t).sum()) ** 2 for t in range(16)) for at in tiles]
        sparsity = 1 - sum(pairs) / 4 / tokens**2
        if not first:
            assert sparsity == pytest.approx(sum(table.sparsity() for table in plan.tables) / 4)
        sees = []
        for axis, side in enumerate(grid, 1):
            a, b = tiles.narrow(axis, 0, side - 1), tiles.narrow(axis, 1, side - 1)
            sees.append((a == b) | (a == -1) | (b == -1))
        shares = [[see.double().mean() for see in sees], [see.any(0).double().mean() for see in sees]]
        near, ever = (", ".join(f"{share:.1%}".replace("%", " %") for share in of) for of in shares)
        row = f"| {shared / tokens:.1%} | {sparsity:.1%} | {1 / (1 - sparsity):.1f}x |".replace("%", " %")
        assert re.search(rf"^\| .*{name}.* {re.escape(row)} {near} \| {ever} \|$", page, re.MULTILINE), (
            row,
            near,
            ever,
        )


def test_plans_are_cached_and_their_tables_share_one_shape():
    method = HilbertA(tiles=5)
    plan = method.plan(((31, 33),), 17)
    assert method.plan(((31, 33),), 17) is plan
    assert HilbertA(tiles=5).plan(((31, 33),), 17) is plan
    assert len({tuple(map(len, table)) for table in plan.tables}) == 1


@pytest.mark.parametrize("slide", ["curve", "diagonal"])
def test_attention_through_the_plan_is_masked_attention_in_raster_order(slide):
    text, (height, width) = 21, (25, 30)
    plan = HilbertA(tiles=3, slide=slide).plan(((height, width),), text)
    q, k, v = (torch.randn(2, 2, text + height * width, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for phase, table in enumerate(plan.tables):
        into = torch.cat([torch.arange(text), text + plan.orders[phase]])
        back = inverse_order(into)
        got = block_attention(q[:, :, into], k[:, :, into], v[:, :, into], table)[:, :, back]
        want = dense_attention(q, k, v, raster_mask(plan, phase, text))[0]
        torch.testing.assert_close(got, want)
        weight = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad((got * weight).sum(), (q, k, v)),
            torch.autograd.grad((want * weight).sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": 0}, "not 0"),
        ({"tiles": "many"}, "not 'many'"),
        ({"tiles": 2.5}, "not 2.5"),
        ({"period": 2.0}, "not 2.0"),
        ({"align": 2.5}, "not 2.5"),
        ({"period": 0}, "period=1 switches sliding off"),
        ({"centre": 1.5}, "not 1.5"),
        ({"curve": "peano"}, "hilbert, moore"),
        ({"reference": "local"}, "not 'local'"),
        ({"slide": "rows"}, "not 'rows'"),
        ({"align": 0}, "align must be 1"),
        ({"dense_layers": "0-1, x"}, "not 'x'"),
        ({"start_percent": 0.5, "end_percent": 0.2}, "0.5 and 0.2"),
        ({"min_tokens": -1}, "not -1"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_options_are_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        HilbertA(**options)


def test_too_many_tiles_are_refused_with_the_most_that_fit():
    with pytest.raises(ValueError, match=r"1024 image tokens cannot make 64 tiles; use tiles<=32"):
        HilbertA(tiles=64).plan(((32, 32),), 0)


def test_layer_lists_take_numbers_and_ranges():
    assert HilbertA(dense_layers="0-1, 56").dense_layer_set() == {0, 1, 56}
    assert HilbertA().dense_layer_set() == set()
