"""Files of in-context learning: pools of examples and blocks of examples."""

import csv
import io
import json
from collections.abc import Hashable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate.methods.example_blocks import Blocks, Embeddings, unit_rows
from foveate.methods.sub_cp import SubCP
from foveate.utils.files import write_whole

__all__ = ["column", "read_blocks", "read_examples", "write_blocks"]


def read_examples(path: Path) -> list[dict[str, Any]]:
    """Rows of a .csv file, whose first line names the columns, or of a .jsonl file.

    Raises:
        ValueError: If the file is of another kind, empty or not UTF-8, or a line cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    if path.suffix == ".csv":
        rows = _csv_rows(text, path)
    elif path.suffix == ".jsonl":
        rows = [_json_row(line, f"{path}, line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        raise ValueError(f"cannot read {path}: pass a .csv file with column names in its first line, or a .jsonl file")
    if not rows:
        raise ValueError(
            f"{path} has no examples: a .csv file needs a line of column names and at least one more line"
        )
    return rows


def _csv_rows(text: str, path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows: list[dict[Any, Any]] = []
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if len(names := reader.fieldnames or []) > len(set(names)):
            raise ValueError(f"{path} names a column twice in its first line: rename one of {', '.join(names)}")
        for row in reader:
            if None in row:  # where DictReader puts surplus fields
                raise ValueError(
                    f"example {len(rows)} of {path} has more fields than the first line names: "
                    "put texts with commas in quotes"
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(
            f"example {len(rows)} of {path} cannot be read ({error}): close each quote, and double the quotes inside "
            "a text in quotes"
        ) from None
    return rows


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON: write one object per line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object: write one object per line")
    return row


def column(rows: Sequence[dict[str, Any]], name: str, path: Path) -> list[str]:
    """One column of the examples, as text.

    Raises:
        ValueError: If an example lacks the column, or the column is empty.
    """
    for index, row in enumerate(rows):
        if name not in row:
            raise ValueError(f"example {index} of {path} has no {name!r}: name one of its columns, {', '.join(row)}")
        if row[name] is None or not str(row[name]).strip():
            raise ValueError(f"example {index} of {path} has nothing in {name!r}: fill it in, or leave it out")
    return [str(row[name]) for row in rows]


def write_blocks(
    path: Path,
    blocks: Blocks,
    embeddings: Embeddings,
    sub: SubCP,
    *,
    labels: Sequence[Hashable] | None = None,
    examples: Sequence[Any] | None = None,
) -> None:
    """Write one line of JSON for each block: its number, ids, examples if given, and a fingerprint of the inputs.

    Args:
        path: File to write.
        blocks: Result of `sub.partition(embeddings, labels=labels)`.
        embeddings: Embeddings of the pool.
        sub: Settings of the partition.
        labels: Labels of the pool, if used.
        examples: Examples of the pool, as values that JSON can represent.
    """
    fingerprint = _fingerprint(embeddings, sub, labels)
    lines: list[str] = []
    for number, ids in enumerate(blocks.ids):
        content = {"block": number, "ids": ids}
        if examples is not None:
            content["examples"] = [examples[i] for i in ids]
        lines.append(json.dumps(content | {"fingerprint": fingerprint}, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines).encode())


def read_blocks(path: Path, embeddings: Embeddings, sub: SubCP, *, labels: Sequence[Hashable] | None = None) -> Blocks:
    """Read the blocks that `write_blocks` wrote for the same embeddings, settings and labels.

    Raises:
        ValueError: If embeddings, settings or labels differ, or the file is not complete.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        ids = [[int(i) for i in line["ids"]] for line in lines]
        fingerprints = {line["fingerprint"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no blocks that can be read ({error}): make them again") from None
    if len(ids) != sub.blocks or fingerprints != {_fingerprint(embeddings, sub, labels)}:
        raise ValueError(f"{path} holds blocks of other embeddings, labels or settings than {sub}: make them again")
    return Blocks(ids, unit_rows(embeddings))


def _fingerprint(embeddings: Embeddings, sub: SubCP, labels: Sequence[Hashable] | None) -> str:
    rows = torch.as_tensor(embeddings).detach().float().cpu().contiguous()
    given = labels.tolist() if isinstance(labels, Tensor) else labels
    about = [list(rows.shape), repr(sub), None if given is None else list(map(str, given))]
    return sha256(json.dumps(about).encode() + rows.numpy().tobytes()).hexdigest()[:32]
