"""Laws of the pictures and plots: they show the numbers and the pixels they were given."""

import io
import math

import numpy as np
import pytest
import torch
from oracle import random_table
from PIL import Image
from random_pictures import picture
from scipy.ndimage import generate_binary_structure, maximum_filter, minimum_filter

from foveate.methods.hilberta import HilbertA
from foveate.ops.curves import hilbert_order
from foveate.plots.figures import draw_losses, draw_order, draw_sheet, draw_table, draw_tiles, figure_png

PLAN = HilbertA(tiles=4).plan(((32, 32),), 16)
BLUE, ORANGE, WHITE = (0, 114, 178), (230, 159, 0), (255, 255, 255)


def blue_squares(table, limit):
    """Which squares are blue; also checks that every square has one colour only."""
    pixels = (np.asarray(draw_table(table, limit))[1:-1, 1:-1] == BLUE).all(-1)
    rows, columns = ((starts < starts[-1]).sum().item() for starts in (table.query_starts, table.key_starts))
    grow = max(1, limit // max(rows, columns))
    squares = pixels[::grow, ::grow]
    assert np.array_equal(squares.repeat(grow, 0).repeat(grow, 1), pixels)
    return squares


@pytest.mark.parametrize("seed", range(5))
def test_table_picture_is_blue_exactly_where_the_lists_say(seed):
    table = random_table(seed, queries=(500, 90), keys=(700,))
    squares = blue_squares(table, limit=40)
    assert squares.shape == (10, 11)
    assert [np.nonzero(row)[0].tolist() for row in squares] == table.lists()


def test_table_picture_leaves_padding_out():
    table = PLAN.tables[0]
    padded = table.padded(40, 50, 999)
    assert blue_squares(table, limit=100).sum() == table.offsets[-1]
    assert np.array_equal(np.asarray(draw_table(padded)), np.asarray(draw_table(table)))


def test_large_tables_shrink_by_maximum():
    table = random_table(3, queries=(64 * 21,), keys=(64 * 21,), block=64)
    full = blue_squares(table, limit=21)
    padded = np.pad(full, ((0, 3), (0, 3)))
    expected = padded.reshape(8, 3, 8, 3).max((1, 3))[:7, :7]
    assert np.array_equal(blue_squares(table, limit=8), expected)


def differing(labels, footprint):
    """Pixels that see two labels or more within the footprint."""
    return maximum_filter(labels, footprint=footprint) != minimum_filter(labels, footprint=footprint)


@pytest.mark.parametrize(("width", "height"), [(512, 512), (1100, 700), (100, 64)])
def test_tiles_are_drawn_at_their_borders_and_nowhere_else(width, height):
    image = picture(width, height)
    grow = math.ceil(384 / width)
    before = np.asarray(image).repeat(grow, 0).repeat(grow, 1)
    after = np.asarray(draw_tiles(image, PLAN.tile_maps[0]))
    assert after.shape == before.shape
    rows, columns = (np.arange(n) * 32 // n for n in before.shape[:2])
    tiles = PLAN.tile_maps[0].numpy()[rows][:, columns]
    pen = max(1, before.shape[1] // 512)
    square, cross = np.ones((4 * pen + 3, 4 * pen + 3)), generate_binary_structure(2, 1)
    assert np.array_equal(after[~differing(tiles, square)], before[~differing(tiles, square)])
    assert (after[differing(tiles == -1, cross)] == ORANGE).all()
    assert (after[differing(tiles, cross) & ~differing(tiles == -1, square)] == WHITE).all()


def test_one_tile_without_a_centre_changes_nothing():
    image = picture(400, 300)
    assert np.array_equal(np.asarray(draw_tiles(image, torch.zeros(30, 40, dtype=torch.long))), np.asarray(image))


def test_picked_tokens_are_marked_in_their_middle():
    image = Image.new("RGB", (400, 300), "#808080")
    one_tile = torch.zeros(3, 4, dtype=torch.long)
    marked = np.asarray(draw_tiles(image, one_tile, torch.tensor([6])))
    assert tuple(marked[150, 250]) == (0xE6, 0x9F, 0x00)
    rows, columns = (marked != 0x80).any(-1).nonzero()
    assert {*rows // 100} == {1}
    assert {*columns // 100} == {2}


@pytest.mark.parametrize(("height", "width"), [(4, 4), (20, 33), (128, 128), (60, 5)])
def test_the_drawn_line_visits_the_cells_in_order_with_row_0_on_top(height, width):
    order = hilbert_order(height, width)
    axes = draw_order(order, height, width).axes[0]
    columns, rows = axes.lines[0].get_data()
    assert (np.asarray(rows) * width + np.asarray(columns)).tolist() == order.tolist()
    assert axes.get_ylim() == (height - 0.5, -0.5)
    ends = [(line.get_label(), line.get_ydata()[0] * width + line.get_xdata()[0]) for line in axes.lines[1:]]
    assert ends == [("start", order[0]), ("end", order[-1])]


def test_cells_of_a_tile_share_their_colour_and_neighbouring_tiles_differ():
    tile_map = HilbertA(tiles=16).plan(((64, 64),), 16).tile_maps[0]
    figure = draw_order(hilbert_order(64, 64), 64, 64, tile_map)
    colours = np.asarray(figure.axes[0].images[0].get_array())
    tiles = tile_map.numpy()
    assert all(len(np.unique(colours[tiles == tile])) == 1 for tile in range(16))
    for a, b, x, y in (
        (tiles[1:], tiles[:-1], colours[1:], colours[:-1]),
        (tiles.T[1:], tiles.T[:-1], colours.T[1:], colours.T[:-1]),
    ):
        assert (x != y)[(a != b) & (a >= 0) & (b >= 0)].all()
    hatched = figure.axes[0].collections[0]
    assert len(hatched.get_paths()) == (tiles == -1).sum()


def test_a_figure_becomes_a_picture_of_its_size():
    tile_map = HilbertA(tiles=2).plan(((8, 8),), 16).tile_maps[0]
    figure = draw_order(hilbert_order(8, 8), 8, 8, tile_map)
    size = Image.open(io.BytesIO(figure_png(figure, dpi=50))).size
    assert size == tuple((figure.get_size_inches() * 50).astype(int))


def test_grids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="an order of 16 cells does not fill a 4 x 5 grid"):
        draw_order(hilbert_order(4, 4), 4, 5)
    with pytest.raises(ValueError, match=r"tile map is \(2, 8\)"):
        draw_order(hilbert_order(4, 4), 4, 4, torch.zeros(2, 8, dtype=torch.long))


def test_a_sheet_has_a_row_for_each_name_and_a_column_for_each_caption():
    rows = {name: [picture(9, 9, seed=10 * i + j) for j in range(3)] for i, name in enumerate(("real", "dense"))}
    captions = ["a cat", "an owl", "a car"]
    axes = draw_sheet(rows, captions).axes
    assert [one.get_title() for one in axes] == [*captions, "", "", ""]
    assert [one.get_ylabel() for one in axes] == ["real", "", "", "dense", "", ""]
    places = [one.get_position() for one in axes]
    assert all(above.y0 > below.y1 for above, below in zip(places[:3], places[3:], strict=True))
    assert places[0].x1 < places[1].x0
    for one, shown in zip(axes, [*rows["real"], *rows["dense"]], strict=True):
        assert np.array_equal(one.images[0].get_array(), np.asarray(shown))


def test_losses_are_drawn_as_they_are_with_a_mean_over_a_twentieth_of_them():
    losses = [2.0 + (step % 2) for step in range(80)]
    every, mean = draw_losses(losses).axes[0].lines
    assert list(every.get_ydata()) == losses
    assert list(every.get_xdata()) == list(range(1, 81))
    assert np.allclose(mean.get_ydata(), 2.5)
    assert list(mean.get_xdata()) == list(range(4, 81))
    draw_losses([0.5])


def test_a_moved_curve_wraps_around_and_its_line_is_broken_at_the_edges():
    whole, moved = (
        draw_order(hilbert_order(8, 8), 8, 8, moved=by).axes[0].lines[0].get_xydata() for by in ((0, 0), (2, 3))
    )
    want = (whole + np.array([3, 2])) % 8
    assert np.array_equal(moved[~np.isnan(moved[:, 0])], want)
    assert np.nanmax(np.abs(np.diff(moved, axis=0))) == 1
    assert np.abs(np.diff(want, axis=0)).max() == 7
