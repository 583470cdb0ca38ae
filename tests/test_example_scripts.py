"""Laws of the examples: each runs as its first lines say, here at the smallest sizes."""

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from foveate.apps.demo.examples import write_examples
from foveate.diffusers.card import CARDS

EXAMPLES = Path(__file__).parent.parent / "examples"
FLUX = "an owl", "--model", "built-in", "--size", "32", "--steps", "2"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), "2 of 2 forward passes sparse"),
        (("--preset", "built-in-128px-ssim-0.9"), "1 of 2 forward passes sparse"),
        pytest.param(
            ("--lora", "built-in-16", "--size", "96"), "1 of 2 forward passes sparse", marks=pytest.mark.slow
        ),
    ],
    ids=["method", "preset", "lora"],
)
def test_flux_generates_a_dense_and_a_sparse_image(run, options, shown):
    assert shown in run("flux.py", *FLUX, *options)
    assert Path("dense.png").read_bytes() != Path("sparse.png").read_bytes()


def test_a_cached_context_answers_a_question(run, tmp_path):
    questions, _ = write_examples(tmp_path)
    first = (tmp_path / "facts" / "01.txt").read_text()
    question = next(asked for asked, answer in questions.items() if f"{asked[:-6]} {answer}." in first)
    printed = run("cached_context.py", "facts", question, "--documents", "2", "--tokens", "2")
    assert f"FullPrefill: '{questions[question]}" in printed
    assert "KL divergence from the full prefill: 0.000" in printed


def test_blocks_of_examples_find_the_label(run, tmp_path):
    _, inputs = write_examples(tmp_path)
    text, label = next(iter(inputs.items()))
    printed = run("example_blocks.py", "examples.csv", text, "--blocks", "2", "--size", "8")
    assert printed.count(f"{label} with probability") == 3


def test_a_method_of_ones_own_generates_an_image(run):
    assert "Strided 2" in run("own_method.py", "an owl", "--stride", "2", "--size", "32", "--steps", "1")
    with Image.open("strided.png") as image:
        assert image.size == (32, 32)


def test_a_model_of_ones_own_runs_with_its_card(run, monkeypatch):
    monkeypatch.setitem(CARDS, "TextAndImage", None)  # takes the card back afterwards
    assert "blocks.0-3.attn  HilbertA T=4" in run("own_model.py", "--size", "16")
