"""Laws of the recipe as a whole: the command makes the folder that is shipped."""

import contextlib
import functools
import json

import numpy as np
import processes
import pytest
import test_video
import torch
from diffusers import FluxPipeline
from lab.training import flow, make
from lab.training.stages import Stage

from foveate.apps.demo.recogniser import load_recogniser
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.pipelines.request import load_pipeline

TINY = {"layers": 1, "single_layers": 1, "heads": 2, "rope": (4, 4, 8), "text_dim": 32, "text_layers": 1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    shrink(monkeypatch)


def shrink(monkeypatch):
    recipe = (
        Stage(name="small", images=8000, batches={16: 4}, rates=(1e-3, 5e-4)),
        Stage(name="large", images=200, batches={16: 4, 32: 2}, rates=(5e-4, 0.0)),
    )
    monkeypatch.setattr(make, "RECIPE", recipe)
    monkeypatch.setattr(make, "RECOGNISER_STEPS", 200)
    monkeypatch.setattr(make, "VAE_STEPS", 200)
    monkeypatch.setattr(make, "untrained_pipeline", functools.partial(untrained_pipeline, **TINY))
    monkeypatch.setattr(make, "train_recogniser", functools.partial(make.train_recogniser, batch=2))
    monkeypatch.setattr(make, "train_vae", functools.partial(make.train_vae, pixels=2 * 16**2, sizes=(16,)))
    monkeypatch.setattr(flow, "SHOWN", 1)


@pytest.fixture
def bars(monkeypatch):
    """Done and all steps of each progress bar."""
    found = {}

    def track(name, length):
        found[name] = [0, length]
        return lambda: found[name].__setitem__(0, found[name][0] + 1)

    monkeypatch.setattr(make, "progress", lambda: contextlib.nullcontext(track))
    return found


def train(out, **options):
    make.main(out=out, sample_every=0, **{"scale": 0.01, **options})


def picture(folder):
    pipeline = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16, "num_inference_steps": 1, "generator": torch.Generator().manual_seed(0)}
    return np.asarray(pipeline("an owl", **options).images[0])


def test_the_command_makes_the_shipped_folder_and_resumes(tmp_path, bars):
    train(tmp_path, minutes=0)
    done, steps = bars["transformer"]
    assert done < steps
    train(tmp_path)
    assert all(done == length for done, length in bars.values())
    assert list(bars) == ["recogniser", "vae", "transformer"]
    load_recogniser(tmp_path / "recogniser.safetensors")
    drawn = picture(tmp_path / "pipeline")
    assert all(json.loads(path.read_text())["padding"] is None for path in tmp_path.rglob("tokenizer.json"))
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "pipeline").rglob("*.json"))
    about = json.loads((tmp_path / "recipe.json").read_text())
    assert [stage["name"] for stage in about["stages"]] == ["small", "large"]
    assert about["minutes"] > 0
    assert about["devices"] == "1 x CPU"
    train(tmp_path)  # nothing is left to do
    assert (picture(tmp_path / "pipeline") == drawn).all()


def test_weights_can_be_fine_tuned_with_the_last_stage(tmp_path, bars):
    first, further = tmp_path / "first", tmp_path / "further"
    train(first)
    before = FluxPipeline.from_pretrained(first / "pipeline", local_files_only=True)
    bars.clear()
    train(further, start=first / "pipeline")
    assert list(bars) == ["transformer"]
    after = FluxPipeline.from_pretrained(further / "pipeline", local_files_only=True)
    change = [
        (a - b).abs().max()
        for a, b in zip(before.transformer.parameters(), after.transformer.parameters(), strict=True)
    ]
    assert 0 < max(change) < 0.1  # trained on, not anew
    about = json.loads((further / "recipe.json").read_text())
    assert [stage["name"] for stage in about["stages"]] == ["large"]
    assert [stage["name"] for stage in about["before"]["stages"]] == ["small", "large"]
    with pytest.raises(ValueError, match=r"is from a run with .*start"):
        train(further, start=further / "pipeline")  # other weights by now
    with pytest.raises(ValueError, match="makes no vae: leave --part out"):
        train(further, part="vae", start=first / "pipeline")
    with pytest.raises(ValueError, match="nowhere"):
        train(tmp_path / "third", start=tmp_path / "nowhere")


def _make_image_and_video_models(out):
    """What each of several processes that torchrun started does."""
    processes.as_torchrun()
    shrink(pytest.MonkeyPatch())
    for part in ("vae", "flow"):
        train(out / "image", part=part, scale=0.005)
    test_video.shrink(pytest.MonkeyPatch())
    test_video.video.main(out / "video", batch=0.05, sample_every=0)


def test_two_processes_make_each_part_together(tmp_path):
    processes.run(2, tmp_path, _make_image_and_video_models, tmp_path)
    for model in ("image", "video"):
        assert json.loads((tmp_path / model / "recipe.json").read_text())["devices"] == "2 x CPU"
        load_pipeline(str(tmp_path / model / "pipeline"))
    picture(tmp_path / "image" / "pipeline")
    assert not (tmp_path / "image" / "recogniser.safetensors").exists()
