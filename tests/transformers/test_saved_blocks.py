"""Laws of saved blocks: they come back as they were, and never for other embeddings, settings or labels."""

import json
from dataclasses import replace

import pytest
import torch

from foveate import SubCP
from foveate.transformers.saved_blocks import read_blocks, write_blocks

SUB = SubCP(blocks=3, block_size=2)
POOL = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def test_blocks_come_back_as_they_were(tmp_path):
    path, blocks = tmp_path / "blocks.jsonl", SUB.partition(POOL)
    write_blocks(path, blocks, POOL, SUB, examples=list("abcdefghijkl"))
    found = read_blocks(path, POOL.numpy(), SUB)
    assert found.ids == blocks.ids
    assert torch.equal(found.pool, blocks.pool)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["examples"] for line in lines] == [["abcdefghijkl"[i] for i in ids] for ids in blocks.ids]


@pytest.mark.usefixtures("as_a_user")
def test_it_does_not_matter_what_embeddings_and_labels_come_in(tmp_path):
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
def test_stale_blocks_are_refused(embeddings, sub, labels, tmp_path):
    path = tmp_path / "blocks.jsonl"
    write_blocks(path, SUB.partition(POOL), POOL, SUB, labels="aabb")
    assert read_blocks(path, POOL, SUB, labels="aabb")
    with pytest.raises(ValueError, match="blocks of other embeddings, labels or settings than SubCP"):
        read_blocks(path, embeddings, sub, labels=labels)


def test_half_a_file_is_refused(tmp_path):
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
