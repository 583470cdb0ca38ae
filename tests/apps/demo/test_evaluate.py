"""Laws of the evaluation: it resumes, never mixes settings, and its intervals have their coverage."""

import io
import json
import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from foveate import HilbertA
from foveate.apps.demo import evaluate
from foveate.apps.demo.evaluate import Interval, Score, _interval, load_dino
from foveate.apps.demo.scenes import scenes
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.pipelines.request import Request

REQUEST = Request("", (64, 64), 2, None, 5)


@pytest.fixture(scope="module")
def pipe():
    return untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


def test_real_renderings_score_high_and_noise_low(pipe, tmp_path):
    real, dense, sparse = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path, prompts=6, request=REQUEST)
    assert (real.label, dense.label, sparse.label) == ("real", "dense", "HilbertA T=4")
    assert real.objects.value > 0.9
    assert real.extra.value < 0.5
    assert real.frechet.value == pytest.approx(0, abs=1e-3)
    assert dense.objects.value < 0.2
    assert dense.frechet.value > 1
    assert real.psnr is dense.psnr is None
    assert 5 < sparse.psnr.value < 60
    assert real.distance is dense.distance is None
    assert 0 < sparse.distance.value < 1
    assert real.efficientnet is dense.efficientnet is None
    assert 0 < sparse.efficientnet.value < 1
    assert real.efficientnet_frechet.value == pytest.approx(0, abs=1e-6)
    assert dense.efficientnet_frechet.value > 100
    assert sparse.flop_bound > 1.2
    assert dense.flop_bound == 1
    assert sparse.seconds > 0
    for score in (real, dense, sparse):
        for cell in score:
            if isinstance(cell, Interval):
                assert cell.low <= cell.value <= cell.high
        for cell in (score.objects, score.relations):
            assert 0 <= cell.low <= cell.high <= 1
        assert score.extra.low >= 0


def test_one_tile_scores_as_dense(pipe, tmp_path):
    _, dense, tiled = evaluate.evaluate(pipe, [HilbertA(tiles=1)], tmp_path, prompts=3, request=REQUEST)
    assert tiled.objects == dense.objects
    assert tiled.frechet.value == pytest.approx(dense.frechet.value, rel=1e-2)
    assert tiled.psnr.value > 50
    assert tiled.distance.value == pytest.approx(0, abs=1e-3)
    assert tiled.efficientnet.value == pytest.approx(0, abs=1e-3)


def test_without_efficientnet_the_other_scores_are_the_same(pipe, tmp_path, monkeypatch):
    whole = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path, prompts=2, request=REQUEST)
    monkeypatch.setattr(evaluate, "why_missing", lambda: "a package is missing")
    without = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path, prompts=2, request=REQUEST)
    assert without == [score._replace(efficientnet=None, efficientnet_frechet=None) for score in whole]


@pytest.mark.slow
def test_distances_may_be_measured_by_dino(pipe, tmp_path):
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    BitImageProcessor(**size).save_pretrained(tmp_path / "dino")
    dino = str(tmp_path / "dino")
    assert load_dino(dino, pipe.device)(40 * [Image.new("RGB", (64, 64), "red")]).shape == (40, 16)
    method = HilbertA(tiles=4)
    *_, mine = evaluate.evaluate(pipe, [method], tmp_path / "out", prompts=2, request=REQUEST)
    *_, theirs = evaluate.evaluate(pipe, [method], tmp_path / "out", prompts=2, request=REQUEST, dino=dino)
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["distance"] == dino
    assert theirs.distance.value != mine.distance.value
    assert theirs._replace(distance=None) == mine._replace(distance=None)
    with pytest.raises(ValueError, match=r"cannot load .*nothing"):
        evaluate.evaluate(pipe, [], tmp_path / "new", prompts=2, request=REQUEST, dino=str(tmp_path / "nothing"))
    assert not (tmp_path / "new" / "dense").exists()


@pytest.mark.slow
def test_an_interrupted_evaluation_is_resumed(pipe, tmp_path, monkeypatch):
    draw, drawn = evaluate.draw_batch, []

    def failing(pipeline, requests):
        drawn.extend(request.seed for request in requests)
        if len(drawn) == 5:
            raise KeyboardInterrupt
        return draw(pipeline, requests)

    monkeypatch.setattr(evaluate, "draw_batch", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path / "broken", prompts=3, request=REQUEST)
    assert drawn == [5, 6, 7, 5, 6]
    bars = {}
    track = lambda name, length: lambda: bars.update({name: bars.get(name, 0) + 1})  # noqa: E731
    scores = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path / "broken", prompts=3, request=REQUEST, track=track)
    assert drawn == [5, 6, 7, 5, 6, 6, 7]
    assert bars == {"dense": 3, "HilbertA T=4": 3, "scoring": 3}
    monkeypatch.undo()
    whole = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path / "whole", prompts=3, request=REQUEST)
    timeless = [[score._replace(seconds=None) for score in some] for some in (scores, whole)]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_pictures_do_not_depend_on_the_batch_and_more_prompts_can_be_added(pipe, tmp_path):
    evaluate.evaluate(pipe, [], tmp_path / "a", prompts=2, request=REQUEST)
    alone = evaluate.evaluate(pipe, [], tmp_path / "a", prompts=5, request=REQUEST)
    together = evaluate.evaluate(pipe, [], tmp_path / "b", prompts=5, request=REQUEST, batch=3)
    assert alone[1].objects == together[1].objects
    assert alone[1].frechet.value == pytest.approx(together[1].frechet.value, rel=1e-2)


def test_a_folder_of_other_settings_or_weights_is_refused(pipe, tmp_path):
    evaluate.evaluate(pipe, [], tmp_path, prompts=2, request=REQUEST)
    with pytest.raises(ValueError, match=r"holds results of steps=2: name another folder"):
        evaluate.evaluate(pipe, [], tmp_path, prompts=2, request=REQUEST._replace(steps=3))
    other = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1, seed=1)
    with pytest.raises(ValueError, match="holds results of weights="):
        evaluate.evaluate(other, [], tmp_path, prompts=2, request=REQUEST)


def test_nothing_is_drawn_if_a_later_method_does_not_fit(pipe, tmp_path):
    good, dense, many = HilbertA(tiles=4), HilbertA(tiles=2, min_tokens=1000), HilbertA(tiles=16)
    for method, why in (
        (dense, "min_tokens=1000: HilbertA T=2 would only repeat dense"),
        (many, "cannot make 16 tiles"),
    ):
        with pytest.raises(ValueError, match=why):
            evaluate.evaluate(pipe, [good, method], tmp_path / "out", prompts=2, request=REQUEST)
        assert not (tmp_path / "out").exists()
    left = []
    methods = [dense, good, many]
    scores = evaluate.evaluate(pipe, methods, tmp_path / "out", prompts=2, request=REQUEST, left_out=left.append)
    assert [score.label for score in scores] == ["real", "dense", "HilbertA T=4"]
    assert [line.split(" is left out: ")[0] for line in left] == [dense.title, many.title]


def test_the_flop_bound_counts_dense_steps(pipe, tmp_path):
    request = REQUEST._replace(steps=4)
    methods = [HilbertA(tiles=4), HilbertA(tiles=4, start_percent=0.75)]
    *_, whole, last = evaluate.evaluate(pipe, methods, tmp_path, prompts=2, request=request)
    assert 1 - 1 / last.flop_bound == pytest.approx((1 - 1 / whole.flop_bound) / 4, abs=1e-3)


def test_results_are_written_with_versions(pipe, tmp_path):
    scores = evaluate.evaluate(pipe, [], tmp_path, prompts=2, request=REQUEST)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["prompts"] == 2
    assert written["versions"]["foveate"]
    assert written["scores"][1]["objects"]["value"] == scores[1].objects.value
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    assert [column.header for column in evaluate.score_table(scores).columns] == ["", "real", "dense"]


def test_an_infinite_psnr_is_null_in_json(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "psnr", lambda *_: math.inf)
    *_, same = evaluate.evaluate(pipe, [HilbertA(tiles=4)], tmp_path, prompts=2, request=REQUEST)
    assert same.psnr.value == math.inf
    written = json.loads((tmp_path / "scores.json").read_text(), parse_constant=pytest.fail)
    assert written["scores"][2]["psnr"] == {"value": None, "low": None, "high": None}


def test_the_time_of_a_batch_is_shared_by_its_pictures(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=iter([10.0, 13.0]).__next__))
    _, dense = evaluate.evaluate(pipe, [], tmp_path, prompts=2, request=REQUEST, batch=2)
    assert dense.seconds == 1.5


def test_the_sheet_has_a_row_for_each_set_and_a_column_for_each_caption(pipe, tmp_path, monkeypatch):
    sheets, draw_sheet = [], evaluate.draw_sheet
    monkeypatch.setattr(evaluate, "draw_sheet", lambda *sheet: sheets.append(sheet) or draw_sheet(*sheet))
    evaluate.evaluate(pipe, [], tmp_path, prompts=3, request=REQUEST)
    ((rows, captions),) = sheets
    assert list(rows) == ["real", "dense"]
    assert captions == [scene.caption for scene in islice(scenes(REQUEST.seed, evaluation=True), 3)]
    for index, (caption, shown) in enumerate(zip(captions, rows["dense"], strict=True)):
        with Image.open(tmp_path / "dense" / f"{index:05}.png") as picture:
            assert picture.text["prompt"] == caption
            assert np.array_equal(np.asarray(picture), np.asarray(shown))


def test_the_table_fits_a_narrow_terminal_with_all_digits():
    numbers = [Interval(i / 80, i / 90, i / 70) for i in range(1, 10)]
    labels = ["real", "dense", "HilbertA T=4", "HilbertA T=16", "ToMA keep=0.5", "ToMA keep=0.25", "LLSA K=8"]
    table = evaluate.score_table([Score(label, *numbers, 8.12, 9.34) for label in labels])
    names, *columns = (list(column.cells) for column in table.columns)
    cells = dict(zip(list(evaluate.HEADINGS.values())[:9], map(str, numbers), strict=True))
    for column in columns:
        assert dict(zip(names, column, strict=True)) == {**cells, "s per image": "8.12", "FLOP bound": "9.34"}
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    for part in " ".join([*cells.values(), "8.12", "9.34"]).split():
        assert printed.count(part) >= len(labels)


def test_intervals_are_clipped_to_the_range_of_fractions():
    assert Interval(0.9, 0.7, 1.1).within(0, 1) == (0.9, 0.7, 1)
    assert Interval(0.1, -0.1, 0.3).within(0, math.inf) == (0.1, 0, 0.3)


def test_intervals_have_their_coverage():
    chance, covered = np.random.default_rng(0), 0
    for _ in range(400):
        hits = chance.random(80) < 0.7
        resampled = chance.integers(80, size=(400, 80))
        _, low, high = _interval(hits.mean(), hits[resampled].mean(1))
        covered += low <= 0.7 <= high
    assert 0.90 < covered / 400 < 0.98
