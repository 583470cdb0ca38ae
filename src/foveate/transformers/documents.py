"""Documents, split into passages."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from foveate.transformers.readers import read_documents

__all__ = ["SEPARATOR", "Passage", "read_documents", "split_documents", "split_text"]

SEPARATOR = "\n\n"
BOUNDARIES = (r"(?<=\n\n)(?!\n)", r"(?<=[.!?]\s)(?!\s)|(?<=[。\uff01\uff1f\n])", r"(?<=\s)(?!\s)", r"")
"""Patterns of the places to split at, best first: after a paragraph; a sentence or line; a word; anywhere."""


class Passage(NamedTuple):
    """A document, or a part of it.

    Attributes:
        name: Name of the document, and the number of the part if there are several.
        text: Text of the passage.
    """

    name: str
    text: str


def split_documents(documents: Mapping[str, str], max_tokens: int, count: Callable[[str], int]) -> list[Passage]:
    """Split documents into passages, each followed by an empty line to separate it from the next.

    Args:
        documents: Texts by name.
        max_tokens: Largest number of tokens in a passage, including the empty line. 0 keeps documents whole.
        count: Number of tokens in a text.

    Raises:
        ValueError: If the empty line alone takes `max_tokens`.
    """
    if max_tokens and (line := count(SEPARATOR)) >= max_tokens:
        raise ValueError(
            f"passages of {max_tokens} tokens have no room for words and an empty line: use {line + 1} or more"
        )
    passages: list[Passage] = []
    for name, text in documents.items():
        parts = split_text(text, max_tokens, lambda part: count(part.strip() + SEPARATOR)) if max_tokens else [text]
        parts = [part.strip() for part in parts if part.strip()]
        names = [name] if len(parts) == 1 else [f"{name}, part {i}" for i in range(1, len(parts) + 1)]
        passages += [Passage(title, part + SEPARATOR) for title, part in zip(names, parts, strict=True)]
    return passages


def split_text(
    text: str, max_tokens: int, count: Callable[[str], int], boundaries: Sequence[str] = BOUNDARIES
) -> list[str]:
    """Split a text into the longest allowed parts. Their concatenation is the text.

    Args:
        text: Text to split.
        max_tokens: Largest number of tokens in a part.
        count: Number of tokens in a text.
        boundaries: Patterns of the places to split at. Each splits only the parts that earlier patterns left too long.

    Examples:
        >>> split_text("One two. Three four five. Six.", 3, lambda text: len(text.split()))
        ['One two. ', 'Three four five. ', 'Six.']
    """
    if not boundaries or count(text) <= max_tokens:
        return [text]
    parts = [""]
    for piece in re.split(boundaries[0], text):
        if count(parts[-1] + piece) <= max_tokens:
            parts[-1] += piece
            continue
        for part in split_text(piece, max_tokens, count, boundaries[1:]):
            if count(parts[-1] + part) <= max_tokens:
                parts[-1] += part
            else:
                parts.append(part)
    return [part for part in parts if part]
