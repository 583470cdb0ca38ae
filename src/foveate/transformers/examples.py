"""Files of in-context learning: pools of examples and blocks of examples."""

import csv
import io
import json
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foveate.methods.example_blocks import Blocks, Embeddings, unit_rows
from foveate.methods.sub_cp import SubCP
from foveate.utils.files import write_whole

__all__ = ["column", "read_blocks", "read_examples", "usable", "write_blocks"]

Bad = dict[int, str]
"""Reason why an example cannot be used, by its number."""


def read_examples(path: Path, bad: Bad | None = None) -> list[dict[str, Any]]:
    """Rows of a .csv file, whose first line names the columns, or of a .jsonl file.

    Args:
        path: File to read.
        bad: If given, it gets the examples that cannot be read, whose rows are empty.

    Raises:
        ValueError: If the file is of another kind, empty or not UTF-8, or a line cannot be read and `bad` is None. A
            quote that is never closed ends a .csv file, and always raises.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    if path.suffix == ".csv":
        rows = _csv_rows(text, path, bad)
    elif path.suffix == ".jsonl":
        rows = list[dict[str, Any]]()
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                rows.append({})
                with _noted(bad, len(rows) - 1):
                    rows[-1] = _json_row(line, f"{path}, line {number}")
    else:
        raise ValueError(f"cannot read {path}: pass a .csv file with column names in its first line, or a .jsonl file")
    if not rows:
        raise ValueError(
            f"{path} has no examples: a .csv file needs a line of column names and at least one more line"
        )
    return rows


@contextmanager
def _noted(bad: Bad | None, example: int) -> Generator[None]:
    """Note a ValueError as the reason why an example cannot be used, or raise it if `bad` is None."""
    try:
        yield
    except ValueError as error:
        if bad is None:
            raise
        bad[example] = str(error)


def _csv_rows(text: str, path: Path, bad: Bad | None) -> list[dict[str, Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows: list[dict[Any, Any]] = []
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if len(names := reader.fieldnames or []) > len(set(names)):
            raise ValueError(f"{path} names a column twice in its first line: rename one of {', '.join(names)}")
        for row in reader:
            rows.append({})
            with _noted(bad, len(rows) - 1):
                if None in row:  # where DictReader puts surplus fields
                    raise ValueError(
                        f"example {len(rows) - 1} of {path} has more fields than the first line names: "
                        "put texts with commas in quotes"
                    )
                rows[-1] = row
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
    return [_field(row, name, f"example {index} of {path}") for index, row in enumerate(rows)]


def usable(rows: Sequence[dict[str, Any]], columns: Sequence[str], path: Path, bad: Bad) -> list[int]:
    """Numbers of the examples that have all of these columns; `bad` gets the others.

    Raises:
        ValueError: If there are none.
    """
    for index, row in enumerate(rows):
        if index not in bad:
            with _noted(bad, index):
                for name in columns:
                    _field(row, name, f"example {index} of {path}")
    kept = [index for index in range(len(rows)) if index not in bad]
    if not kept:
        raise ValueError(f"no example of {path} can be used: {next(iter(bad.values()))}")
    return kept


def _field(row: dict[str, Any], name: str, example: str) -> str:
    if name not in row:
        raise ValueError(f"{example} has no {name!r}: name one of its columns, {', '.join(row)}")
    if row[name] is None or not str(row[name]).strip():
        raise ValueError(f"{example} has nothing in {name!r}: fill it in, or leave it out")
    return str(row[name])


def write_blocks(
    path: Path,
    blocks: Blocks,
    embeddings: Embeddings,
    sub: SubCP,
    *,
    labels: Sequence[Hashable] | None = None,
    examples: Sequence[Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> None:
    """Write one line of JSON for each block: its number, ids, examples if given, and a fingerprint of the inputs.

    Args:
        path: File to write.
        blocks: Result of `sub.partition(embeddings, labels=labels)`.
        embeddings: Embeddings of the pool.
        sub: Settings of the partition.
        labels: Labels of the pool, if used.
        examples: Examples of the pool, as values that JSON can represent.
        numbers: Number of each example of the pool, to write as its id instead of its index.
    """
    fingerprint = _fingerprint(embeddings, sub, labels, numbers)
    lines: list[str] = []
    for number, ids in enumerate(blocks.ids):
        content = {"block": number, "ids": ids if numbers is None else [numbers[i] for i in ids]}
        if examples is not None:
            content["examples"] = [examples[i] for i in ids]
        lines.append(json.dumps(content | {"fingerprint": fingerprint}, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines).encode())


def read_blocks(
    path: Path,
    embeddings: Embeddings,
    sub: SubCP,
    *,
    labels: Sequence[Hashable] | None = None,
    numbers: Sequence[int] | None = None,
) -> Blocks:
    """Read the blocks that `write_blocks` wrote for the same embeddings, settings, labels and numbers.

    Raises:
        ValueError: If embeddings, settings or labels differ, or the file is not complete.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        ids = [[int(i) for i in line["ids"]] for line in lines]
        fingerprints = {line["fingerprint"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no blocks that can be read ({error}): make them again") from None
    if len(ids) != sub.blocks or fingerprints != {_fingerprint(embeddings, sub, labels, numbers)}:
        raise ValueError(f"{path} holds blocks of other embeddings, labels or settings than {sub}: make them again")
    if numbers is not None:
        place = {number: index for index, number in enumerate(numbers)}
        ids = [[place[number] for number in block] for block in ids]
    return Blocks(ids, unit_rows(embeddings))


def _fingerprint(
    embeddings: Embeddings, sub: SubCP, labels: Sequence[Hashable] | None, numbers: Sequence[int] | None
) -> str:
    rows = torch.as_tensor(embeddings).detach().float().cpu().contiguous()
    given = labels.tolist() if isinstance(labels, Tensor) else labels
    about = [list(rows.shape), repr(sub), None if given is None else list(map(str, given))]
    about += [] if numbers is None else [list(numbers)]
    hashed = sha256(json.dumps(about).encode())
    hashed.update(rows.numpy().data)
    return hashed.hexdigest()[:32]
