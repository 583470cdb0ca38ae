"""Laws of the lab's command line."""

import pytest
from lab.__main__ import COMMANDS, app
from lab.training import reader
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_atlas_names_a_missing_font(tmp_path):
    result = run("atlas", "--font", "nowhere.ttf")
    assert result.exit_code == 2
    assert "no Noto Color Emoji in nowhere.ttf" in result.output
    assert list(tmp_path.iterdir()) == []


def test_reader_makes_the_folder_that_transformers_loads(monkeypatch):
    monkeypatch.setattr(reader, "accuracy", lambda model: {"named": 0.25})
    result = run("reader", "--steps", 2, "--batch", 8, "--layers", 2, "--width", 64, "--out", "here")
    assert result.exit_code == 0, result.output
    assert "2,0.2500" in result.output
    config = AutoModelForCausalLM.from_pretrained("here/reader").config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 64)
    assert len(AutoTokenizer.from_pretrained("here/reader")) <= config.vocab_size
    result = run("reader", "--width", 100)
    assert result.exit_code == 2
    assert "multiple of 64, not 100" in result.output


def test_built_in_names_what_is_missing(tmp_path):
    for arguments, message in (
        (["--part", "clip"], "unknown part 'clip': choose recogniser, vae, flow or all"),
        (["--part", "flow"], "holds no autoencoder: make it first with --part vae"),
    ):
        result = run("built-in", *arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--out" in result.output
