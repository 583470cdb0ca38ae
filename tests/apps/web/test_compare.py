"""Laws of the comparison: its page tells what the images beside it are, and they are of one run."""

import base64
import io
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
import tiny_pipelines
from PIL import Image, ImageSequence

from foveate import HilbertA, ToMA, apply
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.apps.web import compare as module
from foveate.apps.web.compare import PAGE, _video_psnr, comparison
from foveate.pipelines.request import Request, draw
from foveate.plots.figures import draw_tiles, strip
from foveate.tuning.similarity import psnr, ssim

REQUEST = Request("a cat", (64, 64), 2, None, 0)


@pytest.fixture(scope="module")
def pipe():
    return untrained_pipeline(layers=1, single_layers=2, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


def names(folder):
    return {path.name for path in folder.glob("*.png")}


def test_the_page_tells_what_can_be_read_off_the_pictures_and_the_summary(pipe, tmp_path):
    method = HilbertA(tiles=4)
    comparison(pipe, REQUEST, [method], tmp_path, settings={}, rounds=2)
    page = (tmp_path / PAGE).read_text()
    with Image.open(tmp_path / "dense.png") as dense, Image.open(tmp_path / "hilberta-t-4.png") as sparse:
        assert re.findall(r"PSNR to dense</dt><dd>([0-9.]+) dB", page) == [f"{psnr(sparse, dense):.1f}"]
        assert re.findall(r"SSIM to dense</dt><dd>([0-9.]+)", page) == [f"{ssim(sparse, dense):.3f}"]
        with apply(pipe, method) as run:
            assert np.array_equal(np.asarray(draw(pipe, REQUEST)[0]), np.asarray(sparse))
            (plan,), layers = run.plans().values(), run.summary().layers
        first = draw_tiles(sparse, plan.tile_maps[0])
    kept = 1 - sum(layer.true for layer in layers) / len(layers)
    assert re.findall(r"FLOP bound of attention</dt><dd>([0-9.]+)", page) == [f"{1 / kept:.2f}"]
    shown = [Image.open(io.BytesIO(base64.b64decode(one))) for one in re.findall(r'base64,([^"]+)" alt="Tiles', page)]
    assert len(shown) == 1
    assert np.array_equal(np.asarray(shown[0]), np.asarray(first))
    assert not np.array_equal(np.asarray(first), np.asarray(draw_tiles(sparse, plan.tile_maps[-1])))
    told = " ".join(page.split())
    assert "one step each, in 2 rounds, so that" in told
    assert "In the first layer an image token attends to its own tile" in told


def test_a_notebook_shows_every_picture_with_its_verdict(pipe, tmp_path):
    shown = comparison(pipe, REQUEST._replace(prompt="<cat>"), [HilbertA(tiles=1), HilbertA(tiles=4)], tmp_path)
    row = shown._repr_html_()
    pictures = [Image.open(io.BytesIO(base64.b64decode(one))) for one in re.findall(r'base64,([^"]+)"', row)]
    for picture, name in zip(pictures, ("dense", "hilberta-t-1", "hilberta-t-4"), strict=True):
        with Image.open(tmp_path / f"{name}.png") as want:
            assert np.array_equal(np.asarray(picture), np.asarray(want))
    assert "&lt;cat&gt;" in row
    assert row.count("the unchanged model") == 1
    assert "identical to dense" in row


def test_a_folder_keeps_what_lay_there_and_takes_one_request(pipe, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "mine.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    comparison(pipe, REQUEST, [HilbertA(tiles=4), ToMA(keep=0.25, tile=(2, 2))], tmp_path, settings={}, rounds=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2 + 3 + 2
    with pytest.raises(ValueError, match="holds results of request="):
        comparison(pipe, REQUEST._replace(size=(48, 48)), [HilbertA(tiles=2)], tmp_path, settings={}, rounds=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    comparison(pipe, REQUEST, [HilbertA(tiles=2)], tmp_path, settings={}, rounds=1)
    assert len(names(tmp_path)) == 2 + 4


@pytest.mark.parametrize("name", ["index.html", "dense.png", "settings.json"])
def test_files_of_others_are_never_overwritten(pipe, tmp_path, name):
    (tmp_path / name).write_text("[]")
    with pytest.raises(ValueError, match="name another folder"):
        comparison(pipe, REQUEST, [HilbertA(tiles=4)], tmp_path, settings={}, rounds=1)
    assert (tmp_path / name).read_text() == "[]"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_method_whose_file_is_taken_is_left_out(pipe, tmp_path):
    (tmp_path / "hilberta-t-4.png").write_text("mine")
    comparison(pipe, REQUEST, [HilbertA(tiles=4)], tmp_path, settings={}, rounds=1)
    assert (tmp_path / "hilberta-t-4.png").read_text() == "mine"
    assert "hilberta-t-4.png would be overwritten" in (tmp_path / PAGE).read_text()


def test_pictures_that_are_there_are_not_drawn_again(pipe, tmp_path, monkeypatch):
    methods, said = [HilbertA(tiles=4), ToMA(keep=0.25, tile=(2, 2))], {"settings": {"prompt": "a cat"}, "rounds": 1}
    comparison(pipe, REQUEST, methods, tmp_path, **said)
    (tmp_path / "hilberta-t-4.png").unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
    drawn = []
    monkeypatch.setattr(module, "draw", lambda *given: drawn.append(given[1]) or draw(*given))
    comparison(pipe, REQUEST, methods, tmp_path, **said)
    page = (tmp_path / PAGE).read_text()
    assert len(drawn) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert page.count("<article") == 3
    monkeypatch.setattr(module, "versions", lambda: {"commit": "another"})
    comparison(pipe, REQUEST, methods[:1], tmp_path, **said)
    assert len(drawn) == 1 + 2


def test_the_page_is_there_as_soon_as_the_first_picture_is(pipe, tmp_path, monkeypatch):
    seen = []

    def drawing(*given):
        seen.append((tmp_path / "index.html").read_text() if (tmp_path / "index.html").exists() else "")
        return draw(*given)

    monkeypatch.setattr(module, "draw", drawing)
    comparison(pipe, REQUEST, [HilbertA(tiles=4), HilbertA(tiles=2)], tmp_path, settings={}, rounds=1)
    assert seen[0] == ""
    assert "Still to be generated: HilbertA T=4, HilbertA T=2." in seen[1]
    assert "Still to be generated: HilbertA T=2." in seen[2]
    assert "Still to be generated" not in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_every_variant_has_a_file_of_its_own(pipe, tmp_path):
    methods = [HilbertA(tiles=4), HilbertA(tiles=4, min_tokens=1)]
    assert methods[0].title == methods[1].title
    comparison(pipe, REQUEST, methods, tmp_path, settings={}, rounds=1)
    made = []
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            made.append(picture.text["method"])
    assert sorted(made) == sorted(["dense", *map(repr, methods)])


def test_a_page_says_that_the_time_is_that_of_a_step_in_which_the_method_decides_anew(pipe, tmp_path):
    methods = [ToMA(keep=0.5, tile=(2, 2)), HilbertA(tiles=4)]
    comparison(pipe, REQUEST, methods, tmp_path, settings={}, rounds=1)
    page = (tmp_path / PAGE).read_text()
    assert f"{methods[0].title}: a plan serves several steps; the time is for the slowest step" in page
    assert page.count("a plan serves several steps") == 1


@pytest.mark.slow
def test_a_video_is_on_the_page_and_beside_it_and_is_not_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    pipe, request = tiny_pipelines.wan(), Request("a cat", (64, 96), 1, None, 0, frames=9, fps=8)
    methods = [HilbertA(tiles=2, align=1)]
    comparison(pipe, request, methods, tmp_path, settings={}, rounds=1)
    page = (tmp_path / PAGE).read_text()
    shown = re.findall(r'<video src="data:video/mp4;base64,([^"]+)" width="96" height="64" controls', page)
    for video, name, method in zip(shown, ("dense", "hilberta-t-2"), (None, *methods), strict=True):
        assert base64.b64decode(video) == (tmp_path / f"{name}.mp4").read_bytes()
        with apply(pipe, method) if method else nullcontext():
            frames = draw(pipe, request)
        with Image.open(tmp_path / f"{name}.png") as video:
            kept = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)]
        assert np.array_equal(kept, [np.asarray(frame) for frame in frames])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.[mp]*")}
    monkeypatch.setattr(module, "draw", lambda *given: pytest.fail("generated again"))
    again = comparison(pipe, request, methods, tmp_path, settings={}, rounds=1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.[mp]*")} == before
    assert again.variants[1].psnr == pytest.approx(_video_psnr(frames, again.variants[0].frames))
    monkeypatch.undo()
    methods = []
    comparison(pipe, request._replace(frames=1), methods, tmp_path / "one", settings={}, rounds=1)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"index.html", "dense.png", "settings.json"}


def test_the_psnr_of_a_video_is_that_of_all_its_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    frames = [Image.fromarray(frame) for frame in pixels]
    ours, dense = frames[:3], [*frames[3:5], frames[2]]  # the last frame is equal
    assert _video_psnr(ours, dense) == pytest.approx(psnr(strip(ours), strip(dense)))
    assert _video_psnr(ours, ours) == math.inf
