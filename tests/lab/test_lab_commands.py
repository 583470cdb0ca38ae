"""Laws of the lab's command line."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from lab.__main__ import COMMANDS, app
from lab.training import reader
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_reader_makes_the_folder_that_transformers_loads(monkeypatch):
    monkeypatch.setattr(reader, "accuracy", lambda model: {"named": 0.25})
    result = run("reader", "--steps", 2, "--batch", 8, "--layers", 2, "--width", 64, "--out", "here")
    assert result.exit_code == 0, result.output
    assert "2,0.2500" in result.output
    config = AutoModelForCausalLM.from_pretrained("here/reader").config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 64)
    assert len(AutoTokenizer.from_pretrained("here/reader")) <= config.vocab_size


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--out" in result.output


def test_the_readme_names_every_command_every_study_and_every_result():
    lab = Path(__file__).parent.parent.parent / "lab"
    named = set(re.findall(r"`([^`]+)`", (lab / "README.md").read_text()))
    scripts = [path for path in sorted(lab.glob("*/*.py")) if "__main__" in path.read_text()]
    studies = [f"-m lab.{path.parent.name}.{path.stem}" for path in scripts]
    assert [study for study in studies if not any(study in command for command in named)] == []
    assert {f"python -m lab {command}" for command in COMMANDS} <= named
    results = [path.name for path in lab.glob("results/*.json")]
    assert [name for name in results if not any(fnmatch(name, pattern) for pattern in named)] == []


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("atlas --font nowhere.ttf", "no Noto Color Emoji in nowhere.ttf"),
        ("reader --width 100", "multiple of 64, not 100"),
        ("built-in --part clip", "unknown part 'clip': choose recogniser, vae, flow or all"),
        ("built-in --part flow", "holds no autoencoder: make it first with --part vae"),
        ("attention --device cpu --pixels 1000", "1000 px do not fit: a token of FLUX.1 is 16 x 16 px"),
        ("attention --device cpu --centre x", "'x' is no list of numbers: write them as 0.25,0"),
        ("log-linear --device cpu --levels deep", "'deep' is no list of whole numbers"),
        ("log-linear --device cpu --tokens 100 --levels 3", "levels=3 is too many for 100 tokens"),
        ("log-linear --device cpu --inputs smooth", "unknown inputs 'smooth': choose from balanced, skewed"),
        ("log-linear --device cpu --top-k 0", "top_k must be 1 or more, not 0"),
        ("train --device cpu --variants full", "unknown variant 'full': choose from cudnn, fa2, dense, top-k, llsa"),
        ("train --device cpu --variants cudnn", "cudnn needs an NVIDIA GPU: use dense on a cpu"),
        ("train --device cpu --dit DiT-L", "unknown size 'DiT-L' of the model: choose DiT-T"),
        ("train --device cpu --pixels 30 --patch 4", "patches of 4 px do not fill 30 x 30 px"),
        ("train --device cpu --dtype float16", "unknown dtype 'float16': train in float32 or bfloat16"),
        ("context --device cpu --model tiny", "unknown model 'tiny': choose one of llama-8b, small"),
        ("context --device cpu", "too many for a CPU: use --model small, or a GPU"),
        ("context --device cpu --model small --tokens 60 --chunk 40", "less than two chunks of 40: use --chunk 30"),
        ("examples --pool 60 --picks 100 --blocks 10", "cannot choose 100 of 60 examples: use --picks 60"),
        ("examples --picks 100", "100 examples do not fill 64 blocks evenly: use --picks 64"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, command, message):
    result = run(*command.split())
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
