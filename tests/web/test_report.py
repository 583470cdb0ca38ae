"""Laws of the pictures and of the page: they show the numbers and the pixels they were given."""

import base64
import io
import math
import re
from html.parser import HTMLParser
from statistics import median

import numpy as np
import pytest
import torch
from oracle import random_table
from PIL import Image
from scipy.ndimage import generate_binary_structure, maximum_filter, minimum_filter
from skimage.metrics import structural_similarity

from foveate.methods.hilberta import HilbertA
from foveate.ops.curves import hilbert_order
from foveate.utils.similarity import detail_ssim, psnr, ssim
from foveate.web.plots import draw_losses, draw_order, draw_sheet, draw_table, draw_tiles, figure_png
from foveate.web.report import Comparison, Objects, Variant, comparison_page, draw_times, step_speed, verdict

PLAN = HilbertA(tiles=4).plan(((32, 32),), 16)
BLUE, ORANGE, WHITE = (0, 114, 178), (230, 159, 0), (255, 255, 255)


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def variant(label="dense", **changes):
    fields = {"frames": [picture(64, 64)], "step_seconds": [], "psnr": None, "ssim": None, "nominal": 0.0, "true": 0.0}
    fields |= {"flop_bound": 1.0, "tile_map": None, "table": None, "why_dense": ""}
    return Variant(label, **(fields | changes))


def sparse(label="HilbertA", **changes):
    fields = {"tile_map": PLAN.tile_maps[0], "table": PLAN.tables[0], "nominal": 0.75, "true": 0.625}
    fields |= {"frames": [picture(64, 64, seed=1)], "flop_bound": 2.67, "psnr": 31.25, "ssim": 0.875}
    fields["detail"] = 0.8
    return variant(label, **(fields | changes))


def comparison(*variants, prompt="a red apple", settings=None, versions=None, notice=""):
    return Comparison(prompt, list(variants), settings or {}, versions or {}, notice)


class Page(HTMLParser):
    """Attributes of all tags, and the text outside of styles and scripts."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("style", "script"):
            self.words.append(data)

    def addresses(self):
        return [attrs[name] for _, attrs in self.tags for name in ("src", "srcset", "href") if name in attrs]

    def pictures(self):
        files = [base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in self.addresses()]
        return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_psnr_is_its_formula():
    a, b = picture(20, 11), picture(20, 11, seed=1)
    error = np.mean((np.asarray(a, float) - np.asarray(b, float)) ** 2)
    assert psnr(a, b) == pytest.approx(10 * math.log10(255**2 / error))


@pytest.mark.parametrize("size", [(3, 3), (4, 9), (64, 48)])
def test_a_picture_is_identical_to_itself(size):
    assert psnr(picture(*size), picture(*size)) == math.inf
    assert ssim(picture(*size), picture(*size)) == 1.0


def test_ssim_is_the_mean_over_channels():
    a, b = picture(30, 20), picture(30, 20, seed=1)
    channels = [structural_similarity(np.asarray(x), np.asarray(y)) for x, y in zip(a.split(), b.split(), strict=True)]
    assert ssim(a, b) == pytest.approx(np.mean(channels))


def test_ssim_of_one_window_is_its_formula():
    # in a picture of 5 x 5 pixels the only whole window is the picture
    a, b = picture(5, 5).convert("L"), picture(5, 5, seed=1).convert("L")
    x, y = np.asarray(a, float).ravel(), np.asarray(b, float).ravel()
    (var_x, cov), (_, var_y) = np.cov(x, y)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * x.mean() * y.mean() + c1) / (x.mean() ** 2 + y.mean() ** 2 + c1)
    assert ssim(a, b) == pytest.approx(luminance * (2 * cov + c2) / (var_x + var_y + c2))


@pytest.mark.parametrize(
    ("metric", "sizes", "message"),
    [
        (psnr, [(8, 8), (8, 9)], "8 x 8 pixels and 8 x 9 pixels"),
        (ssim, [(8, 8), (8, 9)], "8 x 8 pixels and 8 x 9 pixels"),
        (ssim, [(2, 9), (2, 9)], "larger pictures than 2 x 9 pixels"),
    ],
)
def test_pictures_that_cannot_be_compared_are_refused(metric, sizes, message):
    with pytest.raises(ValueError, match=message):
        metric(*(picture(*size) for size in sizes))


# --- pictures --------------------------------------------------------------------------------------------------------


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


def test_bars_are_medians_and_whiskers_the_range():
    times = [[0.3, 0.1, 0.25], [2.0, 1.0, 0.7, 1.2]]
    variants = [variant("dense", step_seconds=times[0]), variant("off"), sparse("a $b_c$", step_seconds=times[1])]
    axes = draw_times(variants).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["dense", "a $b_c$"]
    assert [bar.get_width() for bar in axes.patches] == [median(row) for row in times]
    whiskers = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]
    assert whiskers == [pytest.approx([min(row), max(row)]) for row in times]


# --- the page --------------------------------------------------------------------------------------------------------


def test_page_tells_everything_it_was_given():
    variants = variant("Dense one"), sparse("HilbertA, 4 tiles"), variant("HilbertA, auto", why_dense="too few tokens")
    about = {"settings": {"steps": "20"}, "versions": {"torch": "2.13"}, "notice": "random weights"}
    page = Page(comparison_page(comparison(*variants, **about)))
    for words in ("a red apple", "Dense one", "HilbertA, 4 tiles", "HilbertA, auto", "Stayed dense: too few tokens"):
        assert words in page.text
    for words in ("steps 20", "torch 2.13", "random weights", "31.2 dB", "0.875", "75.0 %", "62.5 %", "2.67\u00d7"):
        assert words in page.text


def test_page_escapes_what_it_was_given():
    attack = '"><script>alert(1)</script>'
    variants = variant(attack, why_dense=attack), sparse(attack, step_seconds=[1.0])
    about = {"settings": {attack: attack}, "versions": {attack: attack}, "notice": attack}
    html = comparison_page(comparison(*variants, prompt=attack, **about))
    assert html.count("<script") == 1, "the page's own"
    # title, heading, notice, two cards, a reason, a pattern; names and values of settings and versions
    assert Page(html).text.count(attack) == 7 + 4


def test_page_embeds_each_picture_exactly_and_needs_no_network():
    variants = [variant(), sparse(frames=[picture(300, 200, seed=5)]), sparse(frames=[picture(31, 17, seed=6)])]
    html = comparison_page(comparison(*variants))
    assert not re.search(r"https?:|url\(|@import|<link|<script src|<iframe|fetch\(", html)
    embedded = Page(html).pictures()  # all addresses are data
    expected = [v.image for v in variants]
    for v in variants[1:]:
        expected += [draw_tiles(v.image, v.tile_map), draw_table(v.table)]
    assert len(embedded) == len(expected)
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(embedded, expected, strict=True))


def test_printed_speedup_is_the_ratio_of_medians():
    dense, ours = [0.31, 0.27, 0.29], [0.12, 0.13, 0.1325]
    page = Page(comparison_page(comparison(variant(step_seconds=dense), sparse(step_seconds=ours))))
    assert re.findall("([0-9.]+)\u00d7 speed-up", page.text) == ["2.23"]
    assert "130.0 ms 120.0 ms to 132.5 ms" in page.text


@pytest.mark.parametrize(
    ("dense", "ours", "bound", "factor", "why"),
    [
        ([3.0, 3.1, 3.2], [2.0, 2.0, 2.1], 2.0, 1.55, ""),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 2.0, 0.5, ""),
        ([3.0], [2.0], 2.0, 1.5, "one round only"),
        ([3.0, 3.0], [2.0, 2.0], 2.0, 1.5, "2 rounds only"),
        ([3.0, 3.0, 6.0], [2.0, 2.0, 2.0], 2.0, 1.5, "1.50 to 3.00\u00d7 in the rounds"),
        ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], 2.0, 3.0, "more than the bound of 2.00\u00d7"),
    ],
)
def test_a_time_that_may_not_be_quoted_is_no_headline(dense, ours, bound, factor, why):
    first, second = variant(step_seconds=dense), sparse(step_seconds=ours, flop_bound=bound)
    speed = step_speed(second, first)
    assert speed == (pytest.approx(factor), not why, why)
    page = Page(comparison_page(comparison(first, second)))
    assert (f"a step: {why}" in page.text) == bool(why)
    assert ("speed-up of the step" in page.text) != bool(why)
    assert ("speed uncertain" in verdict(second, first)) == bool(why)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"psnr": math.inf}, "identical to dense, 2.0\u00d7 faster a step"),
        ({"detail": 0.95}, "nearly identical to dense, 2.0\u00d7 faster a step"),
        ({"detail": 0.78}, "looks like dense, 2.0\u00d7 faster a step"),
        ({"detail": 0.75}, "the same scene with other details, 2.0\u00d7 faster a step"),
        ({"detail": 0.4, "step_seconds": [4.0] * 3}, "differs from dense, 2.0\u00d7 slower a step"),
        ({"step_seconds": [2.01] * 3}, "looks like dense, as fast as dense"),
        ({"step_seconds": []}, "looks like dense"),
        ({"detail": 0.95, "objects": Objects(1, 2, 0)}, "1 of 2 objects lost, 2.0\u00d7 faster a step"),
        ({"detail": 0.95, "objects": Objects(2, 2, 3)}, "2 stray objects, 2.0\u00d7 faster a step"),
        ({"why_dense": "too few tokens"}, "Stayed dense: too few tokens"),
    ],
)
def test_a_verdict_is_one_line_from_the_scores(changes, line):
    dense = variant(step_seconds=[2.0] * 3, objects=Objects(2, 2, 1))
    assert verdict(sparse(**({"step_seconds": [1.0] * 3} | changes)), dense) == line


def test_a_flat_background_does_not_hide_a_lost_object():
    flat, object_ = Image.new("RGB", (64, 64), "green"), Image.new("RGB", (64, 64), "green")
    object_.paste(picture(16, 16), (24, 24))
    assert ssim(flat, object_) > 0.8
    assert detail_ssim(flat, object_) < 0.3
    assert detail_ssim(flat, object_) == detail_ssim(object_, flat)
    assert detail_ssim(object_, object_) == detail_ssim(flat, flat) == 1


def test_what_is_shown_with_its_lora_stands_apart_without_it():
    page = Page(comparison_page(comparison(variant(), sparse("with"), sparse("alone", without_lora=True)))).text
    assert page.index("with ") < page.index("Without the LoRA") < page.index("alone")
    assert "Without the LoRA" not in Page(comparison_page(comparison(variant(), sparse()))).text


def test_a_page_that_grows_says_what_is_missing_and_loads_itself_again():
    grown = comparison(variant())._replace(waiting=["ToMA"], running=True)
    assert 'http-equiv="refresh"' in comparison_page(grown)
    assert "Still to be drawn: ToMA. The page loads itself again." in Page(comparison_page(grown)).text
    stopped = grown._replace(running=False)
    assert "refresh" not in comparison_page(stopped)
    assert "Stopped; the same command goes on." in Page(comparison_page(stopped)).text


def test_what_was_not_timed_is_an_en_dash():
    page = Page(comparison_page(comparison(variant(), sparse(step_seconds=[0.5]))))
    assert page.text.count("\N{EN DASH} speed-up of the step") == 1
    assert page.text.count("Step time \N{EN DASH}") == 1
    assert "Not timed." in Page(comparison_page(comparison(variant(), sparse()))).text


def test_only_small_pictures_are_shown_pixelated():
    page = Page(comparison_page(comparison(variant(frames=[picture(199, 50)]), variant(frames=[picture(200, 50)]))))
    assert [attrs.get("class") for tag, attrs in page.tags if "src" in attrs and tag == "img"] == ["pixelated", None]


def test_caption_speaks_of_a_centre_only_if_there_is_one():
    plan = HilbertA(tiles=4, centre=0.0).plan(((32, 32),), 16)
    without = sparse(tile_map=plan.tile_maps[0], table=plan.tables[0])
    assert "central region" in Page(comparison_page(comparison(variant(), sparse()))).text
    assert "central region" not in Page(comparison_page(comparison(variant(), without))).text


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
