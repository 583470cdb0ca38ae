"""Laws of an index: each passage is encoded once, and no encoded passage is lost."""

import os
from time import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_lm import DOCUMENTS, encoder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foveate.transformers.documents import Passage
from foveate.transformers.index import BuildReport, ChunkIndex

PASSAGES = [Passage(f"{i}.txt", text) for i, text in enumerate(DOCUMENTS)]


@pytest.fixture
def encoded(monkeypatch):
    """Number of tokens of each passage that the test encodes."""
    from foveate.transformers import ChunkEncoder

    seen, original = [], ChunkEncoder._encode
    monkeypatch.setattr(ChunkEncoder, "_encode", lambda self, ids: (seen.append(ids.shape[1]), original(self, ids))[1])
    return seen


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_loaded_chunks_equal_encoded_ones(tmp_path):
    ours = encoder("qwen3", "yarn")
    index = ChunkIndex(tmp_path / "new" / "index", ours, PASSAGES)
    assert index.build() == BuildReport(encoded=4, found=0, removed=0)
    assert index.nbytes == sum(map(len, contents(index.folder).values()))
    for passage, (chunk, loaded) in enumerate(zip(ours.encode(DOCUMENTS), index.load(range(4)), strict=True)):
        assert index.ids[passage] == loaded.ids.tolist()
        assert torch.equal(chunk.keys, loaded.keys)
        assert torch.equal(chunk.values, loaded.values)
    assert index.load([2])[0] is index.load([0, 2])[1]


def test_only_changed_passages_are_encoded_and_unused_files_removed(tmp_path, encoded):
    ours = encoder()
    ChunkIndex(tmp_path, ours, PASSAGES).build()
    before = contents(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not ours")
    encoded.clear()
    same = ChunkIndex(tmp_path, encoder(), [*PASSAGES[::-1], Passage("copy.txt", DOCUMENTS[0])])
    assert same.build() == BuildReport(encoded=0, found=4, removed=0)
    assert encoded == []
    changed = ChunkIndex(tmp_path, ours, [*PASSAGES[1:], Passage("0.txt", DOCUMENTS[0] + " w1")])
    assert changed.build() == BuildReport(encoded=1, found=3, removed=1)
    assert encoded == [8]
    after = contents(tmp_path)
    assert after.pop("model.safetensors") == b"not ours"
    assert len(after.keys() & before.keys()) == 3
    assert all(after[name] == before[name] for name in after.keys() & before.keys())


def test_incomplete_files_are_removed_unless_they_are_new(tmp_path):
    index = ChunkIndex(tmp_path, encoder(), PASSAGES)
    name = index.path(0).name
    for left, age in ((f"{name}.1-2.part", 7200), (f"{name}.3-4.part", 5), ("notes.part", 7200)):
        (tmp_path / left).write_bytes(b"half")
        os.utime(tmp_path / left, (time() - age,) * 2)
    assert index.build() == BuildReport(encoded=4, found=0, removed=0)
    assert {path.name for path in tmp_path.glob("*.part")} == {f"{name}.3-4.part", "notes.part"}


def test_an_interruption_loses_only_the_current_passage(tmp_path, encoded, monkeypatch):
    ours, original = encoder(), ChunkIndex._encode

    def interrupted(self, passage):
        if passage == 2:
            raise KeyboardInterrupt
        return original(self, passage)

    monkeypatch.setattr(ChunkIndex, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ChunkIndex(tmp_path, ours, PASSAGES).build()
    monkeypatch.setattr(ChunkIndex, "_encode", original)
    advances = []
    built = ChunkIndex(tmp_path, ours, PASSAGES).build(lambda name, length: lambda: advances.append(length))
    assert built == BuildReport(encoded=2, found=2, removed=0)
    assert advances == [2, 2]
    assert encoded == [7, 5, 9, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bad.txt has no tokens: leave it out"),
        ("w1 " * 127, r"bad.txt with its prefix: 129 tokens, but .* at most 128"),
    ],
)
def test_bad_passages_are_named_and_files_stay(tmp_path, text, message):
    ours = encoder()
    ChunkIndex(tmp_path, ours, PASSAGES).build()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        ChunkIndex(tmp_path, ours, [*PASSAGES[:1], Passage("bad.txt", text)])
    assert contents(tmp_path) == before


def test_files_of_another_model_and_truncated_files_are_encoded_again(tmp_path):
    ChunkIndex(tmp_path, encoder(seed=1), PASSAGES).build()
    ours = encoder()
    index = ChunkIndex(tmp_path, ours, PASSAGES)
    assert index.build() == BuildReport(encoded=4, found=0, removed=0)
    assert len(index.refused) == 4
    assert all("was made with another weights" in reason for reason in index.refused)
    index.path(1).write_bytes(index.path(1).read_bytes()[:-9])
    again = ChunkIndex(tmp_path, ours, PASSAGES)
    assert again.build().encoded == 1
    assert "not a complete chunk file" in again.refused[0]
    assert torch.equal(again.load([1])[0].keys, ours.encode([DOCUMENTS[1]])[0].keys)


def test_damaged_tensors_are_encoded_again(tmp_path):
    ours = encoder()
    index = ChunkIndex(tmp_path, ours, PASSAGES)
    index.build()
    path = index.path(3)
    chunk = ours.encode([DOCUMENTS[3]])[0]
    tensors = {**load_file(path), "keys": torch.full_like(chunk.keys, torch.nan)}
    about = {**chunk.fingerprint, "text": "x"}
    save_file(tensors, path, about)
    assert index.build().encoded == 0
    assert torch.equal(index.load([3])[0].keys, chunk.keys)
    assert "holds other tensors than its header says" in index.refused[0]
    assert torch.equal(load_file(path)["keys"], chunk.keys)


def test_each_token_has_its_text(tmp_path):
    ours = encoder(vocab_size=256)
    assert ChunkIndex(tmp_path, ours, [Passage("a", "  w1 w2,w3\n\nw4 ")]).words(0) == [
        "  w1",
        " w2",
        ",",
        "w3",
        "\n\nw4",
    ]
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rules = Tokenizer(models.BPE(alphabet, []))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours.tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules)  # a token for each byte
    assert ChunkIndex(tmp_path, ours, [Passage("a", "né\u20ac x")]).words(0) == ["n", "é", "", "€", "", "", " ", "x"]
