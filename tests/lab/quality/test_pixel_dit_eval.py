"""Laws of the comparison of pixel models."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from lab.quality.pixel_dit import VARIANTS, curve, equal_time, main, untrained


@pytest.fixture(autouse=True)
def a_process_of_its_own():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_all_variants_begin_with_the_same_weights_and_differ_in_attention_alone():
    models = {name: untrained(name, "DiT-T", 4).transformer for name in VARIANTS}
    configs = {repr(sorted(model.config.items())) for model in models.values()}
    assert len(configs) == len(VARIANTS)
    for model in models.values():
        for name, weight in models["dense"].state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
    with pytest.raises(ValueError, match="unknown variant 'full': choose from dense, top-k, llsa-bare, llsa"):
        untrained("full", "DiT-T", 4)


def test_a_variant_twice_as_fast_has_twice_the_steps_in_the_time_of_dense():
    assert equal_time(1000, 0.4, 0.2) == 2000
    assert equal_time(1000, 0.2, 0.4) == 500
    assert equal_time(1000, 0.0, 0.4) == 1000


def test_the_curve_is_the_mean_of_runs_of_steps():
    steps = [(1.0, 0.5)] * 100 + [(3.0, 0.5)] * 50
    assert curve(steps) == [
        {"step": 100, "seconds": 50.0, "loss": 1.0},
        {"step": 150, "seconds": 75.0, "loss": 3.0},
    ]


def test_every_variant_is_judged_at_equal_steps_and_at_equal_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"size": 32, "steps": 2, "batch": 2, "before": 1, "at_once": 64, "dit": "DiT-T", "patch": 8}
    options |= {"rate": 1e-3, "average": 0.9, "prompts": 3, "drawn": 3, "compiled": False, "commit": "abc"}
    main(**options, only="dense,llsa", out=tmp_path / "runs")
    path = tmp_path / "lab" / "results" / "pixel-dit-cpu-32px.json"
    result = json.loads(path.read_text())
    assert result["versions"]["commit"] == "abc"
    for name in ("dense", "llsa"):
        variant = result["variants"][name]
        made = [variant[label]["steps"] for label in ("equal steps", "equal time")]
        assert made[0] == 2
        assert len((tmp_path / "runs" / name / "log.csv").read_text().splitlines()) == 1 + max(made)
        assert all(variant[label]["frechet"]["value"] > 0 for label in ("equal steps", "equal time"))
    assert result["variants"]["dense"]["equal time"]["steps"] == 2
    main(**options, only="dense", out=tmp_path / "runs")  # everything is there
    assert json.loads(path.read_text())["variants"]["dense"] == result["variants"]["dense"]
