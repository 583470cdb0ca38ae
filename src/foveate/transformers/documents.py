"""A folder of texts: read, cut into passages, and ranked by the words that they share with a question."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

__all__ = ["KINDS", "Passage", "cut", "passages_of", "read_documents", "shared_words"]

KINDS = ".txt", ".md", ".rst"
END = "\n\n"
BORDERS = (r"(?<=\n\n)(?!\n)", r"(?<=[.!?]\s)(?!\s)|(?<=[。\uff01\uff1f\n])", r"(?<=\s)(?!\s)", r"")
"""Where a text is cut at best: behind a paragraph; a sentence or line; a word; anywhere."""


class Passage(NamedTuple):
    """A document, or a part of it.

    Attributes:
        name: Of the document, and the number of the part if there are several.
        text: What it says.
    """

    name: str
    text: str


def read_documents(folder: Path) -> dict[str, str]:
    """The text of each .txt, .md and .rst file in a folder and its subfolders, by path; hidden ones are left out.

    Raises:
        ValueError: If there is no such folder, none in it, one that is empty, or one that is not UTF-8.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name one that holds {', '.join(KINDS)} files")
    documents: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in KINDS and path.is_file()):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no UTF-8 text: save it as such, or move it away") from None
        if not text.strip():
            raise ValueError(f"{path} is empty: write something into it, or move it away")
        documents[inside.as_posix()] = text
    if not documents:
        raise ValueError(f"{folder} holds no {', '.join(KINDS)} files: name a folder that does")
    return documents


def passages_of(documents: Mapping[str, str], most: int, count: Callable[[str], int]) -> list[Passage]:
    """Documents cut into passages, each with an empty line behind it, since it will stand in front of another.

    Args:
        documents: Texts by name.
        most: Tokens of a passage, the empty line counted. 0 leaves documents whole.
        count: Tells how many tokens a text has.

    Raises:
        ValueError: If the empty line alone takes so many.
    """
    if most and (line := count(END)) >= most:
        raise ValueError(
            f"passages of {most} tokens have no room for words beside an empty line: use {line + 1} or more"
        )

    def placed(part: str) -> int:
        return count(part.strip() + END)

    passages: list[Passage] = []
    for name, text in documents.items():
        parts = [part.strip() for part in cut(text, most, placed)] if most else [text.strip()]
        parts = [part for part in parts if part]
        names = [name] if len(parts) == 1 else [f"{name}, part {i}" for i in range(1, len(parts) + 1)]
        passages += [Passage(title, part + END) for title, part in zip(names, parts, strict=True)]
    return passages


def cut(text: str, most: int, count: Callable[[str], int], borders: Sequence[str] = BORDERS) -> list[str]:
    """Parts of a text, as long as they may be, that together are the text.

    Args:
        text: What to cut.
        most: Tokens of a part.
        count: Tells how many tokens a text has.
        borders: Patterns of places to cut at. One is used only within what is too long for those before it.

    Examples:
        >>> cut("One two. Three four five. Six.", 3, lambda text: len(text.split()))
        ['One two. ', 'Three four five. ', 'Six.']
    """
    if not borders or count(text) <= most:
        return [text]
    parts = [""]
    for whole in re.split(borders[0], text):
        if count(parts[-1] + whole) <= most:
            parts[-1] += whole
            continue
        for part in cut(whole, most, count, borders[1:]):
            if count(parts[-1] + part) <= most:
                parts[-1] += part
            else:
                parts.append(part)
    return [part for part in parts if part]


def shared_words(question: str, texts: Sequence[str]) -> list[float]:
    """How well each text matches the words of a question: BM25 with k1 = 1.5 and b = 0.75 (Robertson et al. 1994).

    Words are compared as they are spelled, in lower case. What they mean plays no part.
    """
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in dict.fromkeys(re.findall(r"\w+", question.lower())):
        holders = sum(word in bag for bag in bags)
        rarity = log(1 + (len(bags) - holders + 0.5) / (holders + 0.5))
        for i, bag in enumerate(bags):
            scores[i] += rarity * 2.5 * bag[word] / (bag[word] + 1.5 * (0.25 + 0.75 * bag.total() / (mean or 1)))
    return scores
