"""Laws of reading examples and of embeddings without a model."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foveate.examples import column, hashed_ngrams, read_embeddings, read_examples, sentence_embeddings


def test_csv_and_jsonl_hold_the_same_examples(tmp_path):
    rows = [{"text": "a, b\nc", "label": "x"}, {"text": "é", "label": "y"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.csv").write_text('text,label\n"a, b\nc",x\né,y\n')
    assert read_examples(tmp_path / "a.jsonl") == read_examples(tmp_path / "a.csv") == rows
    assert column(rows, "label", tmp_path) == ["x", "y"]


def test_embeddings_come_back_from_both_kinds_of_file(tmp_path):
    embeddings = torch.randn(3, 4)
    np.save(tmp_path / "a.npy", embeddings.numpy())
    save_file({"embeddings": embeddings}, tmp_path / "a.safetensors")
    assert torch.equal(read_embeddings(tmp_path / "a.npy"), embeddings)
    assert torch.equal(read_embeddings(tmp_path / "a.safetensors"), embeddings)


def test_texts_that_share_words_or_spelling_are_nearer():
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
        ("a.txt", "x", "give a .csv file with a line of names, or a .jsonl file"),
        ("a.csv", "text,label\n", "has no examples"),
        ("a.jsonl", '{"text": "a"}\n{', "line 2 is no JSON"),
        ("a.jsonl", "[1]", "line 1 is no JSON object"),
    ],
)
def test_files_that_hold_no_examples_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / name)


def test_what_cannot_be_embedded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"example 1 has no words: '\?!'"):
        hashed_ngrams(["a", "?!"])
    with pytest.raises(ValueError, match=r"give a \.npy or a \.safetensors file"):
        read_embeddings(tmp_path / "a.txt")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 tensors \(a, b\): give a file with one"):
        read_embeddings(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"example 1 of .* has no 'text': name one of its columns, label"):
        column([{"text": "a"}, {"label": "b"}], "text", tmp_path)


def test_a_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'foveate\[sentence-transformers\]'"):
        sentence_embeddings(["a"], "all-MiniLM-L6-v2")
