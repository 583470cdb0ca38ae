"""Laws of `foveate icl`: through files it does what the library does."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from foveate import SubCP
from foveate.cli import app
from foveate.examples import hashed_ngrams

WORDS = ["good", "bad", "film", "plot", "acting", "great", "poor", "music", "fun", "dull"]
ROWS = [{"text": f"{WORDS[i % 10]} {WORDS[i * i % 7]} {WORDS[i * 3 % 8]}", "label": i % 3} for i in range(40)]


@pytest.fixture(autouse=True)
def in_a_folder_with_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    np.save(tmp_path / "pool.npy", np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32))


def run(*arguments):
    return CliRunner().invoke(app, ["icl", "pool.jsonl", *map(str, arguments)])


def blocks(path="blocks.jsonl"):
    with open(path) as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("strategy", ["global_local", "local_coherent"])
def test_blocks_are_those_of_the_library_and_carry_their_examples(strategy):
    result = run("--blocks", 4, "--size", 3, "--strategy", strategy, "--embeddings", "pool.npy")
    assert result.exit_code == 0, result.output
    want = SubCP(blocks=4, block_size=3, strategy=strategy).partition(np.load("pool.npy")).ids
    assert [line["ids"] for line in blocks()] == want
    assert [line["block"] for line in blocks()] == [0, 1, 2, 3]
    assert all(line["examples"] == [ROWS[i] for i in line["ids"]] for line in blocks())
    with Image.open("blocks.png") as picture:
        assert picture.size[0] > 500
    for words in ("union coverage", "random choice", "random deal"):
        assert words in " ".join(result.output.split())


def test_without_embeddings_the_text_is_hashed_and_labels_are_dealt():
    result = run("--blocks", 3, "--size", 0, "--label", "label", "--balance", "proportional", "--out", "out/all.jsonl")
    assert result.exit_code == 0, result.output
    labels = [str(row["label"]) for row in ROWS]
    sub = SubCP(blocks=3, block_size=None, balance="proportional")
    want = sub.partition(hashed_ngrams([row["text"] for row in ROWS]), labels=labels).ids
    assert [line["ids"] for line in blocks("out/all.jsonl")] == want
    assert "label distance" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", 20], "40 examples cannot fill 20 blocks of 8: use blocks<=5"),
        (["--strategy", "random"], "unknown strategy 'random': choose one of global_diverse"),
        (["--text", "words"], "has no 'words': name one of its columns, text, label"),
        (["--embeddings", "pool.npy", "--model", "m"], "give one of them"),
        (["--embeddings", "none.npy"], "No such file"),
        (["--balance", "equal"], "needs the labels"),
    ],
)
def test_errors_name_the_value_and_the_remedy(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
