"""Laws of reading examples and of embeddings without a model."""

import json
import math
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foveate import SubCP
from foveate.apps.errors import remedy
from foveate.transformers import embeddings
from foveate.transformers.embeddings import hashed_ngrams, read_embeddings, sentence_embeddings
from foveate.transformers.examples import column, read_blocks, read_examples, usable, write_blocks


def test_csv_and_jsonl_hold_the_same_examples(tmp_path):
    rows = [{"text": "a, b\nc", "label": "x"}, {"text": "é", "label": "y"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.csv").write_text('text,label\n"a, b\nc",x\né,y\n')
    assert read_examples(tmp_path / "a.jsonl") == read_examples(tmp_path / "a.csv") == rows
    assert column(rows, "label", tmp_path) == ["x", "y"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\f", "\v"])
def test_only_an_end_of_line_ends_an_example(mark, tmp_path):
    rows = [{"text": f"before{mark}after", "label": "x"}, {"text": "b", "label": "y"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    (tmp_path / "a.csv").write_text(f"text,label\r\nbefore{mark}after,x\r\nb,y\r\n", encoding="utf-8", newline="")
    assert read_examples(tmp_path / "a.csv") == read_examples(tmp_path / "a.jsonl") == rows


def test_embeddings_are_read_from_both_kinds_of_file(tmp_path):
    embeddings = torch.randn(3, 4)
    np.save(tmp_path / "a.npy", embeddings.numpy())
    save_file({"embeddings": embeddings}, tmp_path / "a.safetensors")
    assert torch.equal(read_embeddings(tmp_path / "a.npy"), embeddings)
    assert torch.equal(read_embeddings(tmp_path / "a.safetensors"), embeddings)


def test_texts_that_share_words_or_spelling_are_more_similar():
    texts = [
        "the film was great",
        "A great film!",
        "films were greatest",
        "invoice due on monday",
        "the film was great",
    ]
    rows = torch.nn.functional.normalize(hashed_ngrams(texts), dim=1)
    same, near, spelled, far = (rows[0] @ rows[i] for i in (4, 1, 2, 3))
    assert same.item() == pytest.approx(1)
    assert same > near > spelled > far
    assert torch.equal(hashed_ngrams(texts), hashed_ngrams(texts))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "pass a .csv file with column names"),
        ("a.csv", "text,label\n", "has no examples"),
        ("a.jsonl", '{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.csv", "text,label\na,b\ngood, really,pos\n", r"example 1 of .* more fields .*: put texts with commas"),
        ("a.csv", "text,label\né,b\n".encode("latin-1"), "a.csv is not UTF-8 text: save it as UTF-8"),
    ],
)
def test_files_that_hold_no_examples_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n{\n\n{"text": "b"}\n{"text": " ", "label": 2}\n{"text": "c", "label": 3}\n',
        ),
        ("a.csv", "text,label\na,1\na,b,c\nb\n ,2\nc,3\n"),
    ],
)
def test_bad_examples_are_noted_and_the_others_keep_their_numbers(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    bad = {}
    rows = read_examples(tmp_path / name, bad)
    assert len(rows) == 5
    assert list(bad) == [1]
    assert usable(rows, ["text", "label"], tmp_path / name, bad) == [0, 4]
    assert sorted(bad) == [1, 2, 3]
    for number, reason in ((2, "example 2"), (3, "nothing in 'text'")):
        assert reason in bad[number]
    with pytest.raises(ValueError, match=r"no example of .* can be used: example 0 of .* has no 'none'"):
        usable(rows[:1], ["none"], tmp_path / name, {})


def test_blocks_of_skipped_pools_have_the_numbers_of_the_file(tmp_path):
    rows, sub = torch.randn(6, 3), SubCP(blocks=2, block_size=2)
    blocks, numbers = sub.partition(rows), [0, 2, 3, 5, 8, 9]
    write_blocks(tmp_path / "a.jsonl", blocks, rows, sub, numbers=numbers)
    written = [json.loads(line)["ids"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert written == [[numbers[i] for i in block] for block in blocks.ids]
    assert read_blocks(tmp_path / "a.jsonl", rows, sub, numbers=numbers).ids == blocks.ids
    for others in (None, [0, 2, 3, 5, 8, 10]):
        with pytest.raises(ValueError, match="make them again"):
            read_blocks(tmp_path / "a.jsonl", rows, sub, numbers=others)


def test_hashed_words_follow_their_definition_in_batches(monkeypatch):
    texts = ["The film, the FILM was", "great", "naïve café 12", "film " * 9]
    want = torch.zeros(4, 512, dtype=torch.float64)
    for row, text in zip(want, texts, strict=True):
        counts = {}
        for word in text.lower().replace(",", "").split():
            for gram in [word, *(f"<{word}>"[i : i + 3] for i in range(len(word)))]:
                counts[gram] = counts.get(gram, 0) + 1
        for gram, count in counts.items():
            code = crc32(gram.encode())
            row[code % 512] += (1 + math.log(count)) * (1 if code >= 2**31 else -1)
    monkeypatch.setattr(embeddings, "HASHED_AT_ONCE", 3)
    assert torch.allclose(hashed_ngrams(texts).double(), want, atol=1e-6)


def test_bad_texts_and_embeddings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"example 1 has no words: '\?!'"):
        hashed_ngrams(["a", "?!"])
    with pytest.raises(ValueError, match=r"pass a \.npy or a \.safetensors file"):
        read_embeddings(tmp_path / "a.txt")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 tensors \(a, b\): pass a file with one"):
        read_embeddings(tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:20])
    (tmp_path / "cut.npy").write_bytes(b"")
    np.save(tmp_path / "objects.npy", np.array([{}, None]), allow_pickle=True)
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "number.npy", np.float32(1))
    for name in ("cut.safetensors", "cut.npy", "objects.npy", "words.npy"):
        with pytest.raises(ValueError, match=rf"{name} holds no embeddings that can be read: write an array"):
            read_embeddings(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"number.npy holds an array of shape \[\]: it needs one row for each example"
    ):
        read_embeddings(tmp_path / "number.npy")
    with pytest.raises(ValueError, match=r"example 1 of .* has no 'text': name one of its columns, label"):
        column([{"text": "a"}, {"label": "b"}], "text", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('text,label\n"a,x\nb,y\n', r"example 0 of .* cannot be read \(unexpected end of data\): close each quote"),
        ('text,label\na,x\n"b"c,y\n', r"example 1 of .* cannot be read .*: close each quote"),
        ("text,text\na,b\n", "names a column twice in its first line: rename one of text, text"),
        ("text,label\na, \n", "example 0 of .* has nothing in 'label': fill it in, or leave it out"),
        ("text,label\na,x\nb\n", "example 1 of .* has nothing in 'label'"),
    ],
)
def test_faults_of_a_csv_file_are_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        column(read_examples(tmp_path / "a.csv"), "label", tmp_path / "a.csv")


def test_a_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ImportError) as missing:
        sentence_embeddings(["a"], "all-MiniLM-L6-v2")
    assert "pip install 'foveate[sentence-transformers]'" in remedy(missing.value)


SUB = SubCP(blocks=3, block_size=2)
POOL = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def test_written_blocks_are_read_back(tmp_path):
    path, blocks = tmp_path / "blocks.jsonl", SUB.partition(POOL)
    write_blocks(path, blocks, POOL, SUB, examples=list("abcdefghijkl"))
    found = read_blocks(path, POOL.numpy(), SUB)
    assert found.ids == blocks.ids
    assert torch.equal(found.pool, blocks.pool)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["examples"] for line in lines] == [["abcdefghijkl"[i] for i in ids] for ids in blocks.ids]


@pytest.mark.usefixtures("as_a_user")
def test_tensors_arrays_and_lists_are_equivalent(tmp_path):
    path, labels = tmp_path / "blocks.jsonl", torch.arange(12) % 3
    sub = replace(SUB, balance="equal")
    learned = POOL.clone().requires_grad_()
    blocks = sub.partition(learned, labels=labels)
    assert not blocks.pool.requires_grad
    assert blocks.ids == sub.partition(POOL, labels=labels.tolist()).ids
    write_blocks(path, blocks, learned, sub, labels=labels, examples=["a\u2028b\x85c"] * 12)
    assert read_blocks(path, POOL.tolist(), sub, labels=labels.tolist()).ids == blocks.ids


@pytest.mark.parametrize(
    ("embeddings", "sub", "labels"),
    [
        (POOL + 1e-6, SUB, "aabb"),
        (POOL[:11], SUB, "aabb"),
        (POOL[:, :3], SUB, "aabb"),
        (POOL, replace(SUB, order="central_last"), "aabb"),
        (POOL, SUB, "abab"),
        (POOL, SUB, None),
    ],
)
def test_blocks_of_other_inputs_are_refused(embeddings, sub, labels, tmp_path):
    path = tmp_path / "blocks.jsonl"
    write_blocks(path, SUB.partition(POOL), POOL, SUB, labels="aabb")
    assert read_blocks(path, POOL, SUB, labels="aabb")
    with pytest.raises(ValueError, match="blocks of other embeddings, labels or settings than SubCP"):
        read_blocks(path, embeddings, sub, labels=labels)


def test_incomplete_files_are_refused(tmp_path):
    path = tmp_path / "blocks.jsonl"
    write_blocks(path, SUB.partition(POOL), POOL, SUB)
    lines = path.read_text().splitlines(keepends=True)
    for content, message in (
        ("".join(lines[:2]), "make them again"),
        (lines[0][:-9], "holds no blocks"),
        ("1", "holds no"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_blocks(path, POOL, SUB)
