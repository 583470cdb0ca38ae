"""Laws of the comparison of pixel models."""

import json

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from lab.quality.pixel_dit import VARIANTS, WINDOW, attend_in_windows, curve, equal_time, main, untrained

from foveate.nn.pixel_dit import attend_densely


@pytest.fixture(autouse=True)
def a_process_of_its_own():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_all_variants_begin_with_the_same_weights_and_differ_in_attention_alone():
    models = {name: untrained(name, "DiT-T", 4).transformer for name in VARIANTS}
    kinds = {(repr(sorted(one.config.items())), one.blocks[0].attn.processor.own) for one in models.values()}
    assert len({str(kind) for kind in kinds}) == len(VARIANTS)
    for model in models.values():
        for name, weight in models["dense"].state_dict().items():
            assert torch.equal(model.state_dict()[name], weight)
    with pytest.raises(ValueError, match="unknown variant 'full': choose from dense, windows, top-k, llsa"):
        untrained("full", "DiT-T", 4)


def test_windows_attend_to_their_own_tokens_and_the_text():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 2 * WINDOW, 8).double().unbind()
    extra_k, extra_v = torch.randn(2, 2, 3, 5, 8).double().unbind()
    window = torch.arange(2 * WINDOW) // WINDOW
    mask = torch.cat([window[:, None] == window, torch.ones(2 * WINDOW, 5, dtype=torch.bool)], 1)
    wanted = F.scaled_dot_product_attention(q, torch.cat([k, extra_k], 2), torch.cat([v, extra_v], 2), mask)
    out, *_ = attend_in_windows(q, k, v, extra_k=extra_k, extra_v=extra_v)
    torch.testing.assert_close(out, wanted)
    small = attend_in_windows(q[:, :, :30], k[:, :, :30], v[:, :, :30], extra_k=extra_k, extra_v=extra_v)[0]
    dense = attend_densely(q[:, :, :30], k[:, :, :30], v[:, :, :30], extra_k=extra_k, extra_v=extra_v)[0]
    torch.testing.assert_close(small, dense)


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
    main(**options, only="dense,windows,llsa", out=tmp_path / "runs")
    path = tmp_path / "lab" / "results" / "pixel-dit-cpu-32px.json"
    result = json.loads(path.read_text())
    assert result["versions"]["commit"] == "abc"
    for name in ("dense", "windows", "llsa"):
        variant = result["variants"][name]
        made = [variant[label]["steps"] for label in ("equal steps", "equal time")]
        assert made[0] == 2
        assert len((tmp_path / "runs" / name / "log.csv").read_text().splitlines()) == 1 + max(made)
        assert all(variant[label]["frechet"]["value"] > 0 for label in ("equal steps", "equal time"))
    assert result["variants"]["dense"]["equal time"]["steps"] == 2
    main(**options, only="dense", out=tmp_path / "runs")  # everything is there
    assert json.loads(path.read_text())["variants"]["dense"] == result["variants"]["dense"]
