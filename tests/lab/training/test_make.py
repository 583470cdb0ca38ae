"""Laws of the recipe as a whole: the command makes the folder that is shipped."""

import functools
import json

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from lab.training import flow, make
from lab.training.stages import Stage
from PIL import Image

from foveate.demo.recogniser import load_recogniser
from foveate.demo.untrained import untrained_pipeline

TINY = {"layers": 1, "single_layers": 1, "heads": 2, "rope": (4, 4, 8), "text_dim": 32, "text_layers": 1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    recipe = (
        Stage(name="small", images=8000, batches={16: 4}, rates=(1e-3, 5e-4)),
        Stage(name="large", images=200, batches={16: 4, 32: 2}, rates=(5e-4, 0.0)),
    )
    monkeypatch.setattr(make, "RECIPE", recipe)
    monkeypatch.setattr(make, "RECOGNISER_STEPS", 200)
    monkeypatch.setattr(make, "VAE_STEPS", 200)
    monkeypatch.setattr(make, "untrained_pipeline", functools.partial(untrained_pipeline, **TINY))
    monkeypatch.setattr(make, "train_recogniser", functools.partial(make.train_recogniser, batch=2))
    monkeypatch.setattr(make, "train_vae", functools.partial(make.train_vae, pixels=2 * 16**2, sides=(16,)))
    monkeypatch.setattr(flow, "WORKERS", 0)
    monkeypatch.setattr(flow, "sample_grid", lambda *_: Image.new("RGB", (2, 2)))


def picture(folder):
    pipeline = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16, "num_inference_steps": 1, "generator": torch.Generator().manual_seed(0)}
    return np.asarray(pipeline("an owl", **options).images[0])


def test_the_command_makes_the_shipped_folder_and_resumes(tmp_path):
    bars = {}

    def track(name, length):
        bars[name] = [0, length]
        return lambda: bars[name].__setitem__(0, bars[name][0] + 1)

    assert not make.make(tmp_path, scale=0.01, minutes=0, track=track)
    assert make.make(tmp_path, scale=0.01, track=track)
    assert all(done == length for done, length in bars.values())
    assert list(bars) == ["recogniser", "vae", "small", "large"]
    load_recogniser(tmp_path / "recogniser.safetensors")
    drawn = picture(tmp_path / "pipeline")
    assert all(json.loads(path.read_text())["padding"] is None for path in tmp_path.rglob("tokenizer.json"))
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "pipeline").rglob("*.json"))
    about = json.loads((tmp_path / "recipe.json").read_text())
    assert [stage["name"] for stage in about["stages"]] == ["small", "large"]
    assert about["minutes"] > 0
    assert about["devices"] == "1 x CPU"
    assert make.make(tmp_path, scale=0.01)  # nothing is left to do
    assert (picture(tmp_path / "pipeline") == drawn).all()


def test_weights_can_be_fine_tuned_with_the_last_stage(tmp_path):
    first, further = tmp_path / "first", tmp_path / "further"
    make.make(first, scale=0.01)
    before = FluxPipeline.from_pretrained(first / "pipeline", local_files_only=True)
    names = []
    assert make.make(further, start=first / "pipeline", scale=0.01, track=lambda name, _: names.append(name) or int)
    assert names == ["large"]
    after = FluxPipeline.from_pretrained(further / "pipeline", local_files_only=True)
    change = [
        (a - b).abs().max()
        for a, b in zip(before.transformer.parameters(), after.transformer.parameters(), strict=True)
    ]
    assert 0 < max(change) < 0.1  # trained on, not anew
    about = json.loads((further / "recipe.json").read_text())
    assert [stage["name"] for stage in about["stages"]] == ["large"]
    assert [stage["name"] for stage in about["before"]["stages"]] == ["small", "large"]
    with pytest.raises(ValueError, match=r"is of a run with .*start"):
        make.make(further, start=further / "pipeline", scale=0.01)  # other weights by now
    with pytest.raises(ValueError, match="makes no vae: leave --part out"):
        make.make(further, part="vae", start=first / "pipeline")
    with pytest.raises(ValueError, match="nowhere"):
        make.make(tmp_path / "third", start=tmp_path / "nowhere")


def test_a_part_can_be_trained_alone_and_names_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="holds no autoencoder: make it first with --part vae"):
        make.make(tmp_path, part="flow")
    assert make.make(tmp_path, part="vae", scale=0.005)
    assert make.make(tmp_path, part="flow", scale=0.01)
    assert not (tmp_path / "recogniser.safetensors").exists()
