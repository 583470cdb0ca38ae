"""Examples for in-context learning: read from files, and turned into embeddings."""

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foveate.utils.progress import Track, silent

__all__ = ["column", "hashed_ngrams", "read_embeddings", "read_examples", "sentence_embeddings"]

DIMS = 512


def read_examples(path: Path) -> list[dict[str, Any]]:
    """The rows of a .csv file, whose first line names the columns, or of a .jsonl file.

    Raises:
        ValueError: If the file is of another kind, empty, or no UTF-8, or a line cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text: save it as such") from None
    if path.suffix == ".csv":
        rows = _table(text, path)
    elif path.suffix == ".jsonl":
        rows = [_row(line, f"{path}, line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        raise ValueError(f"cannot read {path}: give a .csv file with a line of names, or a .jsonl file")
    if not rows:
        raise ValueError(f"{path} has no examples: a .csv file needs a line of names and one line more")
    return rows


def column(rows: Sequence[dict[str, Any]], name: str, path: Path) -> list[str]:
    """One column, as text.

    Raises:
        ValueError: If an example does not have it.
    """
    for index, row in enumerate(rows):
        if row.get(name) is None:
            have = ", ".join(row)
            raise ValueError(f"example {index} of {path} has no {name!r}: name one of its columns, {have}")
    return [str(row[name]) for row in rows]


def read_embeddings(path: Path) -> Tensor:
    """What a .npy file holds, or the one tensor of a .safetensors file.

    Raises:
        ValueError: If the file is of another kind, damaged, or holds several tensors, or one without rows.
    """
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"cannot read {path}: give a .npy or a .safetensors file")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else {"": torch.from_numpy(np.load(path))}
    except (SafetensorError, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{path} holds no embeddings that can be read ({error}): write it again") from None
    if len(tensors) != 1:
        raise ValueError(f"{path} holds {len(tensors)} tensors ({', '.join(tensors)}): give a file with one")
    (embeddings,) = tensors.values()
    if embeddings.ndim != 2:
        raise ValueError(f"{path} holds numbers of shape {list(embeddings.shape)}: give one row for each example")
    return embeddings


def hashed_ngrams(texts: Sequence[str], track: Track = silent) -> Float[Tensor, "texts dims"]:
    """Embeddings without a model: words and runs of three letters, each hashed to a place and a sign.

    A word or run that occurs n times counts 1 + log n. Texts are alike if they share words and spelling; what they
    mean plays no part.

    Raises:
        ValueError: If a text has neither letters nor digits.
    """
    embeddings, advance = torch.zeros(len(texts), DIMS), track("embeddings", len(texts))
    for index, text in enumerate(texts):
        words = re.findall(r"\w+", text.lower())
        if not words:
            raise ValueError(f"example {index} has no words: {text!r}; leave it out")
        counts: dict[str, int] = {}
        for gram in (gram for word in words for gram in (word, *_threes(f"<{word}>"))):
            counts[gram] = counts.get(gram, 0) + 1
        for gram, count in counts.items():
            code = crc32(gram.encode())
            embeddings[index, code % DIMS] += (1 + np.log(count)) * (1 if code >> 31 else -1)
        advance()
    return embeddings


def sentence_embeddings(texts: Sequence[str], model: str, track: Track = silent) -> Float[Tensor, "texts dims"]:
    """Embeddings by a model of sentence-transformers, which is downloaded if it is not there.

    Raises:
        ImportError: If sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"embeddings by {model} need sentence-transformers: pip install 'foveate[sentence-transformers]', "
            "or leave the model out"
        ) from error
    encoder, parts = SentenceTransformer(model), [texts[i : i + 256] for i in range(0, len(texts), 256)]
    advance, embeddings = track("embeddings", len(parts)), list[Tensor]()
    for part in parts:
        embeddings.append(encoder.encode(list(part), convert_to_tensor=True, show_progress_bar=False).cpu())
        advance()
    return torch.cat(embeddings)


def _table(text: str, path: Path) -> list[dict[str, Any]]:
    rows: list[dict[Any, Any]] = list(csv.DictReader(io.StringIO(text, newline="")))
    for index, row in enumerate(rows):
        if None in row:  # what is left of it
            raise ValueError(
                f"example {index} of {path} has more fields than the first line names: put texts with commas in quotes"
            )
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error.msg}): write one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object: write one object a line")
    return row


def _threes(word: str) -> list[str]:
    return [word[i : i + 3] for i in range(len(word) - 2)]
