"""Laws of `foveate tune`, tried as a user would."""

import json
import re

import pytest
from command_line import run, words

from foveate.apps.cli import pictures
from foveate.diffusers.adapter import ModelAdapter
from foveate.tuning import measure

SMALL = ["--size", "64", "--steps", "2", "--device", "cpu", "--method", "hilberta:tiles=4"]


def test_a_preset_is_found_and_drawn_with(folder, tmp_path, monkeypatch):
    time = 0.0

    def now(_device):  # sparse steps take half a second, dense ones a whole
        nonlocal time
        time += 0.5 if any(ModelAdapter.of(model) for model in models) else 1.0
        return time

    models, opened = [], pictures.open_model
    monkeypatch.setattr(
        pictures, "open_model", lambda *options: models.append((p := opened(*options)).transformer) or p
    )
    monkeypatch.setattr(measure, "now", now)
    (tmp_path / "prompts.txt").write_text("a cat\n\n an owl \n")
    tune = ["tune", "--model", folder, "--prompts", "prompts.txt", *SMALL]
    result = run(*tune, "--min-psnr", "1")
    assert result.exit_code == 0, result.output
    assert "HilbertA T=4: 2.00x a step" in words(result)
    assert "the steps of an image are 2.00x faster" in words(result)
    assert result.output.rstrip().endswith("tuned/psnr-1.json")
    preset = json.loads((tmp_path / "tuned" / "psnr-1.json").read_text())
    assert preset["methods"][0]["options"]["tiles"] == 4
    assert [one["prompt"] for one in preset["evidence"]["held_out"]] == ["an owl"]

    result = run(
        "generate", "a cat", "--model", folder, "--steps", 1, "--device", "cpu", "--method", "tuned/psnr-1.json"
    )
    assert result.exit_code == 0, result.output
    assert "HilbertA T=4" in words(result)
    assert "portable" in words(result)

    result = run(*tune, "--min-ssim", "1")
    assert result.exit_code == 2
    assert re.search(
        r"error: no setting that saves time reaches SSIM 1 in every image: the nearest, .*", words(result)
    )
    assert {path.name for path in (tmp_path / "tuned").glob("*.json")} == {
        "settings.json", "measured.json", "psnr-1.json",
    }  # fmt: skip

    result = run("generate", "a cat", "--size", 64, "--device", "cpu", "--method", "tuned/psnr-1.json")
    assert result.exit_code == 2
    assert "the preset is for a FluxTransformer2DModel with" in words(result)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--min-ssim", "0.9", "--min-psnr", "30"], "two budgets"),
        (["--prompts", "nothing.txt"], "cannot read the prompts nothing.txt: name a text file"),
        (["--prompts", "one.txt"], "two prompts or more"),
        (["--method", "hilberta:start_percent=0.2"], "leave them out of HilbertA"),
        (["--method", "hilbert"], "did you mean hilberta"),
        (["--size", "big"], "cannot read the size"),
        (["--size", "129"], "129 x 129 px does not fit"),
        (["--out", "one.txt"], "is a file"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(arguments, told, tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("a cat\n")
    monkeypatch.setattr(pictures, "open_model", lambda *_: pytest.fail("loaded a model"))
    result = run("tune", *arguments)
    assert result.exit_code == 2, result.output
    assert told in words(result)
    assert words(result).count("error:") == 1


def test_a_preset_that_is_not_there_is_said_before_a_model_is_loaded():
    for arguments in (["generate", "a cat", "--method", "no.json"], ["eval", "--method", "no.json"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "there is no preset no.json" in words(result)
        assert "loading" not in words(result)
