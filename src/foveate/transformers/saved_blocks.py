"""Blocks of examples on disk, which know what they were made from: stale ones are refused."""

import json
from collections.abc import Hashable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate.methods.sub_cp import SubCP
from foveate.ops.example_blocks import Blocks, Embeddings, unit_rows
from foveate.utils.files import write_whole

__all__ = ["read_blocks", "write_blocks"]


def write_blocks(
    path: Path,
    blocks: Blocks,
    embeddings: Embeddings,
    sub: SubCP,
    *,
    labels: Sequence[Hashable] | None = None,
    examples: Sequence[Any] | None = None,
) -> None:
    """Write a line of JSON for each block: its number, its ids, its examples if given, and a fingerprint.

    Args:
        path: File to write.
        blocks: What `sub.partition(embeddings, labels=labels)` gave.
        embeddings: Of the pool.
        sub: The settings.
        labels: Of the pool, if they were given.
        examples: Of the pool; anything that JSON can hold.
    """
    of = _fingerprint(embeddings, sub, labels)
    lines: list[str] = []
    for number, ids in enumerate(blocks.ids):
        content = {"block": number, "ids": ids}
        if examples is not None:
            content["examples"] = [examples[i] for i in ids]
        lines.append(json.dumps(content | {"fingerprint": of}, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines).encode())


def read_blocks(path: Path, embeddings: Embeddings, sub: SubCP, *, labels: Sequence[Hashable] | None = None) -> Blocks:
    """The blocks that `write_blocks` wrote for the same embeddings, settings and labels.

    Raises:
        ValueError: If they were made from others, or the file is not whole.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        ids = [[int(i) for i in line["ids"]] for line in lines]
        known = {line["fingerprint"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no blocks that can be read ({error}): make them again") from None
    if len(ids) != sub.blocks or known != {_fingerprint(embeddings, sub, labels)}:
        raise ValueError(f"{path} holds blocks of other embeddings, labels or settings than {sub}: make them again")
    return Blocks(ids, unit_rows(embeddings))


def _fingerprint(embeddings: Embeddings, sub: SubCP, labels: Sequence[Hashable] | None) -> str:
    rows = torch.as_tensor(embeddings).detach().float().cpu().contiguous()
    given = labels.tolist() if isinstance(labels, Tensor) else labels
    about = [list(rows.shape), repr(sub), None if given is None else list(map(str, given))]
    return sha256(json.dumps(about).encode() + rows.numpy().tobytes()).hexdigest()[:32]
