"""Laws of `foveate icl`: through files it does what the library does."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import tiny_lm
import torch
from PIL import Image
from transformers import BloomConfig, GPTNeoXConfig, MistralConfig
from typer.testing import CliRunner

from foveate import SubCP
from foveate.apps.cli import app
from foveate.apps.cli.icl import DRAWS, _compared
from foveate.transformers.embeddings import hashed_ngrams
from foveate.transformers.in_context import Host, prompt_with
from foveate.utils.progress import silent

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
    result = run("--blocks", 4, "--block-size", 3, "--strategy", strategy, "--embeddings", "pool.npy")
    assert result.exit_code == 0, result.output
    want = SubCP(blocks=4, block_size=3, strategy=strategy).partition(np.load("pool.npy")).ids
    assert [line["ids"] for line in blocks()] == want
    assert [line["block"] for line in blocks()] == [0, 1, 2, 3]
    assert all(line["examples"] == [ROWS[i] for i in line["ids"]] for line in blocks())
    with Image.open("blocks.png") as picture:
        assert picture.size[0] > 500
    for words in ("union coverage", "random choice", "random partition"):
        assert words in " ".join(result.output.split())


def test_a_model_that_cannot_read_blocks_is_refused_before_anything_is_loaded_or_printed(tmp_path):
    GPTNeoXConfig().save_pretrained(tmp_path / "a")  # there are no weights
    BloomConfig().save_pretrained(tmp_path / "b")
    MistralConfig(sliding_window=8).save_pretrained(tmp_path / "c")
    for name, refused in {"a": "cannot load a", "b": "BloomForCausalLM does not take blocks", "c": "Mistral"}.items():
        result = run("--label", "label", "--ask", "good film", "--model", name, "--device", "cpu")
        assert result.exit_code == 2
        assert refused in " ".join(result.output.split())
        assert not result.stdout.strip()
        assert not (tmp_path / "blocks.jsonl").exists()


def test_without_embeddings_the_text_is_hashed_and_labels_are_balanced():
    result = run(
        "--blocks", 3, "--block-size", 0, "--label", "label", "--balance", "proportional", "--out", "out/all.jsonl"
    )
    assert result.exit_code == 0, result.output
    labels = [str(row["label"]) for row in ROWS]
    sub = SubCP(blocks=3, block_size=None, balance="proportional")
    want = sub.partition(hashed_ngrams([row["text"] for row in ROWS]), labels=labels).ids
    assert [line["ids"] for line in blocks("out/all.jsonl")] == want
    assert "label distance" in result.output


def test_lost_labels_are_told_with_their_counts():
    rows = [{"text": f"word{i} more", "label": "usual"} for i in range(30)] + 2 * [
        {"text": "word1 more", "label": "rare"}
    ]
    Path("pool.jsonl").write_text("\n".join(map(json.dumps, rows)))
    some = ["--blocks", 2, "--block-size", 2, "--label", "label"]
    for _ in range(2):  # the second time the blocks are read
        told = " ".join(run(*some).output.split())
        assert "no block has an example of 1 of 2 labels: 'rare' (2 in the pool); use --balance" in told
    assert "no block" not in run(*some, "--balance", "proportional").output
    assert {row["label"] for line in blocks() for row in line["examples"]} == {"usual", "rare"}


@pytest.mark.parametrize("given", [False, True])
def test_bad_examples_are_skipped_and_listed_and_ids_are_those_of_the_file(given):
    rows = [dict(row) for row in ROWS]
    rows[3]["label"], rows[7]["text"] = None, "?!"
    lines = [json.dumps(row) for row in rows]
    lines[5] = "{"
    Path("pool.jsonl").write_text("\n".join(lines))
    pool = np.load("pool.npy")
    pool[9] = np.nan
    np.save("pool.npy", pool)
    some = ["--blocks", 4, "--block-size", 3, "--label", "label", *(["--embeddings", "pool.npy"] if given else [])]
    assert run(*some).exit_code == 2
    result = run(*some, "--skip-bad")
    assert result.exit_code == 0, result.output
    with open("blocks.skipped.jsonl") as file:
        skipped = [json.loads(line)["example"] for line in file]
    assert skipped == ([3, 5, 9] if given else [3, 5, 7])
    assert f"skipped {len(skipped)} examples" in " ".join(result.output.split())
    kept = [i for i in range(len(rows)) if i not in skipped]
    embedded = torch.from_numpy(pool[kept]) if given else hashed_ngrams([rows[i]["text"] for i in kept])
    want = SubCP(blocks=4, block_size=3).partition(embedded).ids
    assert [line["ids"] for line in blocks()] == [[kept[i] for i in block] for block in want]
    assert all(line["examples"] == [rows[i] for i in line["ids"]] for line in blocks())


def test_blocks_of_the_same_embeddings_and_settings_are_reused():
    small = ["--blocks", 4, "--block-size", 3]
    run(*small)
    made = blocks()
    assert "holds the blocks of these" in run(*small).output
    assert blocks() == made
    for other in (
        ["--blocks", 4, "--block-size", 2],
        [*small, "--embeddings", "pool.npy"],
        [*small, "--order", "central_last"],
    ):
        result = run(*other)
        assert "holds the blocks of these" not in result.output
        assert blocks() != made
        run(*small)


def test_random_partitions_are_of_the_chosen_examples_and_random_choices_of_the_pool():
    pool = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    blocks = SubCP(blocks=3, block_size=4).partition(pool)
    reports = _compared("ours", blocks, None, silent)
    (ours,) = reports["ours"]
    assert [report.union_coverage for report in reports["random partition"]] == pytest.approx(
        [ours.union_coverage] * DRAWS
    )
    assert max(report.union_coverage for report in reports["random choice"]) < ours.union_coverage
    for kind in ("random partition", "random choice"):
        assert len({round(report.mean_coverage, 5) for report in reports[kind]}) == DRAWS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_lm.language_model(dtype=torch.float32, max_position_embeddings=512).save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def words():
    """Examples in the words of the tiny model."""
    rows = [{"text": f"w{1 + i % 9} w{1 + i * i % 11} w{1 + i % 7}", "label": f"w{20 + i % 3}"} for i in range(24)]
    with open("pool.jsonl", "w") as file:
        file.write("\n".join(map(json.dumps, rows)))
    return rows


@pytest.mark.parametrize("host", get_args(Host))
def test_a_host_answers_a_question_from_the_blocks(model, words, host):
    asked = ["--blocks", 3, "--block-size", 2, "--label", "label", "--ask", "w3 w1", "--model", model]
    asked += ["--combine", host]
    result = run(*asked, "--mix", "poe")
    assert result.exit_code == 0, result.output
    sub = SubCP(blocks=3, block_size=2)
    ours = sub.partition(hashed_ngrams([row["text"] for row in words]))
    told = [[f"text: {words[i]['text']}\nlabel: {words[i]['label']}\n\n" for i in block] for block in ours.ids]
    lm, tokenizer = tiny_lm.language_model(dtype=torch.float32, max_position_embeddings=512), tiny_lm.tokenizer()
    reader = prompt_with(lm, tokenizer, told, host)
    weights = ours.weights(hashed_ngrams(["w3 w1"])[0])
    want = reader.probabilities("text: w3 w1\nlabel:", [" w20", " w21", " w22"], weights, "poe")
    for probability in want.tolist():
        assert f"{probability:.3f}" in result.output
    written = run(*asked, "--mix", "poe", "--max-new-tokens", 3)
    assert reader.generate("text: w3 w1\nlabel:", 3, weights, "poe") in written.output


def test_with_a_file_of_embeddings_all_blocks_weigh_the_same(model, words):
    np.save("few.npy", np.random.default_rng(0).normal(size=(24, 6)))
    result = run("--block-size", 2, "--label", "label", "--embeddings", "few.npy", "--ask", "w3", "--model", model)
    assert result.exit_code == 0, result.output
    assert "all blocks weigh the same" in result.output


@pytest.mark.parametrize("out", ["pool.jsonl", "./pool.jsonl", "link.jsonl", "blocks.png", "blocks", "a.jsonl"])
def test_the_output_must_be_another_jsonl_file(out, tmp_path):
    (tmp_path / "link.jsonl").symlink_to("pool.jsonl")
    (tmp_path / "a.jsonl").mkdir()
    before = sorted(tmp_path.iterdir())
    result = run(
        "--blocks", 2, "--block-size", 2, "--out", out, "--text", "none"
    )  # which would fail at the first work
    assert result.exit_code == 2
    assert f"--out must name a file of blocks, not {Path(out)}" in " ".join(result.output.split())
    assert [json.loads(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()] == ROWS
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", 20], "40 examples cannot fill 20 blocks of 8: use at most 5 blocks or blocks of at most 2"),
        (["--strategy", "random"], "'random' is not one of 'global_diverse', 'global_local'"),
        (["--text", "words"], "has no 'words': name one of its columns, text, label"),
        (["--embeddings", "pool.npy", "--embed", "m"], "give one of them"),
        (["--embeddings", "none.npy"], "none.npy: No such file or directory"),
        (["--balance", "equal"], "--balance needs --label"),
        (["--max-similarity", 2], "must be a cosine between 0 and 1, not 2.0"),
        (["--ask", "good"], "--ask needs --label"),
        (["--combine", "all"], "'all' is not one of 'concatenate', 'ensemble', 'parallel_windows'"),
        (["--mix", "mean"], "'mean' is not one of 'moe', 'poe', 'max'"),
        (["--ask", "good", "--label", "label", "--model", "nowhere"], "cannot load nowhere"),
        (["--ask", " ", "--label", "label"], "--ask ' ' has no words"),
    ],
)
def test_errors_name_the_value_and_the_remedy(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
