"""Documents, split into passages."""

import re
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

__all__ = ["SEPARATOR", "Passage", "TokenSpans", "opened_image", "split_documents", "split_text"]

MAX_PIXELS = 2**25
SEPARATOR = "\n\n"
PARAGRAPH, SENTENCE = r"(?<=\n\n)(?!\n)", r"(?<=[。\uff01\uff1f\n])|(?<=[.!?]\s)(?!\s)"
BORDERS = PARAGRAPH, SENTENCE, rf"{SENTENCE}|(?<=\s)(?!\s)"
"""Patterns of the places to split at, best first: after paragraphs; sentences and lines as well; words as well."""

TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""Function that gives the first character of each token of a text, and the character after its last."""


class Passage(NamedTuple):
    """A document, or a part of it.

    Attributes:
        name: Name of the document, and the number of the part if there are several.
        text: Text of the passage; before an image, what it is found by.
        image: Content of an image file, as base64. Empty for a text.
    """

    name: str
    text: str
    image: str = ""

    @property
    def content(self) -> str | list[Any]:
        """The passage as `ChunkEncoder.encode` takes it."""
        return [self.text, opened_image(b64decode(self.image)), SEPARATOR] if self.image else self.text


def opened_image(content: bytes) -> Any:
    """The image (PIL) in the content of a file.

    Raises:
        ValueError: If it is no image, is damaged, or has more than `MAX_PIXELS`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(content))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"an image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}: shrink it")
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"an image cannot be read ({str(error).splitlines()[0]:.80}): save it again") from error


def split_documents(documents: Mapping[str, str | bytes], max_tokens: int, spans: TokenSpans) -> list[Passage]:
    """Split documents into passages, each followed by an empty line to separate it from the next.

    Args:
        documents: Texts, or contents of image files, by name. An image is a passage of its own, found by its name.
        max_tokens: Largest number of tokens in a passage, including the empty line. 0 keeps documents whole.
        spans: Tokens of a text.

    Raises:
        ValueError: If the empty line alone takes `max_tokens`.
    """
    if max_tokens and (line := len(spans(SEPARATOR))) >= max_tokens:
        raise ValueError(
            f"passages of {max_tokens} tokens have no room for words and an empty line: use {line + 1} or more"
        )
    passages: list[Passage] = []
    for name, text in documents.items():
        if isinstance(text, bytes):
            passages.append(Passage(name, f"{name}\n", b64encode(text).decode()))
            continue
        parts = split_text(text, max_tokens, spans, SEPARATOR) if max_tokens else [text]
        parts = [part.strip() for part in parts if part.strip()]
        names = [name] if len(parts) == 1 else [f"{name}, part {i}" for i in range(1, len(parts) + 1)]
        passages += [Passage(title, part + SEPARATOR) for title, part in zip(names, parts, strict=True)]
    return passages


def split_text(text: str, max_tokens: int, spans: TokenSpans, ending: str = "") -> list[str]:
    r"""Split a text into the longest allowed parts, at the best border before the limit. They join to the text.

    The text is tokenized once, and each part once more, because a part alone may have other tokens: the time is linear
    in the length of any text.

    Args:
        text: Text to split.
        max_tokens: Largest number of tokens in a part without the space around it and with the ending. A character
            with more tokens is a part of its own.
        spans: Tokens of a text.
        ending: Text that will follow each part.

    Examples:
        >>> split_text("One two. Three four five. Six.", 3, lambda text: [m.span() for m in re.finditer(r"\S+", text)])
        ['One two. ', 'Three four five. ', 'Six.']
    """
    splitter = _Splitter(text, spans(text))
    room, parts, start = max(1, max_tokens - len(spans(ending))), list[str](), 0
    while start < len(text):
        tokens, less = room, 0
        part = text[start : splitter.cut(start, tokens)]
        while tokens > 1 and (excess := len(spans(part.strip() + ending)) - max_tokens) > 0:
            less = max(2 * less, excess)  # so that few trials suffice
            tokens = max(tokens // 2, room - less)
            part = text[start : splitter.cut(start, tokens)]
        parts.append(part)
        start += len(part)
    return parts


class _Splitter:
    """Places to split a text at.

    Args:
        text: Text to split.
        spans: First character of each token, and the character after its last.
    """

    def __init__(self, text: str, spans: Sequence[tuple[int, int]]) -> None:
        self._end = len(text)
        self._starts, self._stops = (sorted(span[side] for span in spans) for side in (0, 1))
        self._borders = [[match.start() for match in re.finditer(kind, text)] for kind in BORDERS]

    def cut(self, start: int, tokens: int) -> int:
        """End of a part with at most this many tokens, or with one character.

        Of a piece between two borders that is too long for a part, the part takes as much as it can.
        """
        limit = self._limit(start, tokens)
        for borders in self._borders if limit < self._end else ():
            after = bisect_right(borders, limit)
            border, following = borders[after - 1] if after else 0, (borders[after : after + 1] or [self._end])[0]
            if border > start and following <= self._limit(border, tokens):
                return border
        return limit

    def _limit(self, start: int, tokens: int) -> int:
        """First character that no longer belongs to this many tokens."""
        number = bisect_right(self._stops, start) + tokens
        if number < len(self._starts) and self._starts[number] <= start:
            number = bisect_right(self._starts, start)
        return self._starts[number] if number < len(self._starts) else self._end
