"""Laws of the page of `make demo`: it says what Foveate is, and its speeds are those that were measured."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from foveate import HilbertA, ToMA
from foveate.apps.demo import page
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.apps.web.compare import PAGE, comparison
from foveate.apps.web.report import Comparison, Variant, comparison_page
from foveate.pipelines.request import Request

ROOT = Path(__file__).parents[3]
INTRO = page._intro(
    page.IMAGE_SPEEDS, page.IMAGES, "video/index.html", "The same for a video", ("run at 1024 px", "run at 2048 px")
)


@pytest.mark.parametrize(
    ("rows", "document"), [(page.IMAGE_SPEEDS, "README.md"), (page.VIDEO_SPEEDS, "docs/quality-videos.md")]
)
def test_each_row_is_one_of_the_tables_that_are_checked_against_results(rows, document):
    lines = [
        [cell.strip(" *") for cell in line.split("|")[1:-1]]
        for line in (ROOT / document).read_text().splitlines()
        if line.startswith("| ")
    ]
    for row in rows:
        shown = {row.objects, row.small, row.large}
        assert sum(cells[:1] == [row.setting] and shown <= {*cells, ""} for cells in lines) == 1, row


def test_each_card_and_commit_is_that_of_the_results():
    runs = set()
    for path in (ROOT / "lab" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        about = result.get("versions") or result if isinstance(result, dict) else {}
        runs.add((str(about.get("GPU", about.get("device"))), about.get("commit")))
    for row in (*page.IMAGE_SPEEDS, *page.VIDEO_SPEEDS):
        assert any(card.startswith(row.card) and commit == row.commit for card, commit in runs), row


def test_the_page_says_what_foveate_is_and_leaves_noise_out(tmp_path):
    pipe = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    methods = [ToMA(keep=0.75, tile=(2, 2)), HilbertA(tiles=4)]
    comparison(pipe, Request("a cat", (64, 64), 1, None, 0), methods, tmp_path, settings={}, rounds=1, intro=INTRO)
    html = (tmp_path / PAGE).read_text()
    text = " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", "", html, flags=re.DOTALL)).split())
    assert text.index(page.HEADLINE) < text.index("a cat") < text.index("Measured on GPUs")
    _, toma, _, hilberta = page.IMAGE_SPEEDS
    largest = (row.large.replace("x", "\u00d7 run at 2048 px, NVIDIA H200") for row in (toma, hilberta))
    for words in ("from foveate import ToMA, apply", page.MERGES, f"NVIDIA H200, {toma.commit}", *largest):
        assert words in text
    for words in ("uncertain", "per step", "on this machine (", "Step time"):
        assert words not in text
    assert 'href="video/index.html"' in html


def test_times_of_this_machine_are_a_footnote_if_they_are_certain():
    frames = [Image.new("RGB", (8, 8))]
    variants = [
        Variant("dense", frames, step_seconds=[2.0, 2.0, 2.0]),
        Variant("ToMA keep=0.75", frames, step_seconds=[1.0, 1.0, 1.0], flop_bound=3.0),
        Variant("LLSA K=16", frames, step_seconds=[1.0, 1.0, 3.0], flop_bound=3.0),
    ]
    shown = Comparison("a cat", variants, {}, {"CPU": "of a test", "GPU": "none"}, "", intro=INTRO)
    html = " ".join(comparison_page(shown).split())
    assert "The small model on this machine (of a test), a step compared with dense: ToMA keep=0.75 2.0\u00d7." in html


@pytest.mark.slow
def test_the_pages_of_the_demo_are_written_and_lead_to_each_other(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(page, "STEPS", 1)
    first = page.write_pages(tmp_path, "cpu")
    for path, link in ((first, "video/index.html"), (tmp_path / "video" / PAGE, "../index.html")):
        html = path.read_text()
        assert f'href="{link}"' in html
        assert (path.parent / link).exists()
        assert page.HEADLINE in html
