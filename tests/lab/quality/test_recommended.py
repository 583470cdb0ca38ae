"""Laws of the study of the recommended settings: each is scored once, and what was generated is kept."""

import json

import pytest
import typer
from lab.quality import recommended

from foveate import ToMA

UNTRAINED = [ToMA(keep=0.75)]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Runs a study on images of 128 px in an empty folder; returns its results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recommended, "STEPS", 3)
    monkeypatch.setattr(recommended, "RUN", recommended.RUN | {"strength": 0.7, "num_inference_steps": 3})
    monkeypatch.setattr(recommended, "UNTRAINED", UNTRAINED)
    monkeypatch.setattr(recommended, "LORAS", {"built-in-16": "lora-16"})
    monkeypatch.setattr(recommended, "PHOTOGRAPHS", ("coffee", "rocket"))

    def run(study, name):
        recommended.main(study, size=128, prompts=2, batch=2, device="cpu")
        return json.loads((tmp_path / "lab" / "results" / f"{name}-cpu-128px.json").read_text())

    return run


@pytest.mark.parametrize(
    ("study", "name", "first"),
    [("captions", "recommended", ["real", "dense"]), ("photographs", "photographs", ["dense"])],
)
def test_each_setting_is_scored_once_and_a_second_run_generates_nothing(study, name, first, small, tmp_path):
    scores = small(study, name)["scores"]
    labels = [score["label"] for score in scores]
    assert labels == [*first, *(method.title for method in UNTRAINED), labels[-1]]
    assert labels[-1].endswith("distilled")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("out/**/*.png") if path.name != "sheet.png"}
    assert len(written) == 2 * (len(labels) - (study == "captions"))
    assert small(study, name)["scores"] == scores
    assert {path: path.stat().st_mtime_ns for path in written} == written
    if study == "photographs":
        for score in scores[1:]:
            for field in ("psnr", "ssim", "efficientnet"):
                assert score[field] == pytest.approx(sum(one[field] for one in score["each"]) / 2)
            assert 0 < score["efficientnet"] < 1


def test_an_unknown_study_is_refused():
    with pytest.raises(typer.BadParameter, match="unknown study 'videos'"):
        recommended.main("videos")
