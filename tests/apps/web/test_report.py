"""Laws of the page: it shows the numbers and the pixels it was given."""

import base64
import io
import math
import re
from html.parser import HTMLParser
from statistics import median

import numpy as np
import pytest
from PIL import Image
from random_pictures import picture

from foveate.apps.web.report import (
    Comparison,
    Objects,
    Variant,
    comparison_page,
    draw_times,
    step_speed,
    verdict,
)
from foveate.methods.hilberta import HilbertA
from foveate.plots.figures import draw_table, draw_tiles, figure_png
from foveate.tuning.similarity import detail_ssim, ssim

PLAN = HilbertA(tiles=4).plan(((32, 32),), 16)


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


def test_bars_are_medians_and_whiskers_the_range():
    times = [[0.3, 0.1, 0.25], [2.0, 1.0, 0.7, 1.2]]
    variants = [variant("dense", step_seconds=times[0]), variant("off"), sparse("a $b_c$", step_seconds=times[1])]
    axes = draw_times(variants).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["dense", "a $b_c$"]
    assert [bar.get_width() for bar in axes.patches] == [median(row) for row in times]
    whiskers = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]
    assert whiskers == [pytest.approx([min(row), max(row)]) for row in times]


@pytest.mark.filterwarnings("error")  # Matplotlib warns if there is no room for bars
def test_bars_have_room_beside_long_labels():
    label = "HilbertA T=4 slide=curve + ToMA keep=0.5, distilled"
    figure = draw_times([variant(name, step_seconds=[1.0]) for name in ("dense", label)])
    figure_png(figure, dpi=100)  # the dpi of the figure, so that places in it are those of the image
    texts = [*figure.axes[0].get_yticklabels(), *figure.axes[0].texts]
    assert all(figure.bbox.contains(*corner) for text in texts for corner in text.get_window_extent().corners())


def test_a_long_prompt_is_cut_in_the_heading_and_whole_among_the_settings():
    prompt = "a red apple " * 900
    page = Page(comparison_page(comparison(variant("dense"))._replace(prompt=prompt, settings={"prompt": prompt})))
    assert page.text.count("a red apple") < 930


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
    assert (f"per step: {why}" in page.text) == bool(why)
    assert ("speed-up of the step" in page.text) != bool(why)
    assert ("speed uncertain" in verdict(second, first)) == bool(why)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"psnr": math.inf}, "identical to dense, 2.0\u00d7 faster per step"),
        ({"detail": 0.95}, "nearly identical to dense, 2.0\u00d7 faster per step"),
        ({"detail": 0.78}, "close to dense, 2.0\u00d7 faster per step"),
        ({"detail": 0.75}, "the same scene with other details, 2.0\u00d7 faster per step"),
        ({"detail": 0.4, "step_seconds": [4.0] * 3}, "differs from dense, 2.0\u00d7 slower per step"),
        ({"step_seconds": [2.01] * 3}, "close to dense, as fast as dense"),
        ({"step_seconds": []}, "close to dense"),
        ({"detail": 0.95, "objects": Objects(1, 2, 0)}, "1 of 2 objects lost, 2.0\u00d7 faster per step"),
        ({"detail": 0.95, "objects": Objects(2, 2, 3)}, "2 stray objects, 2.0\u00d7 faster per step"),
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
    assert "Still to be generated: ToMA. The page reloads automatically." in Page(comparison_page(grown)).text
    stopped = grown._replace(running=False)
    assert "refresh" not in comparison_page(stopped)
    assert "Stopped; the same command resumes." in Page(comparison_page(stopped)).text


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
