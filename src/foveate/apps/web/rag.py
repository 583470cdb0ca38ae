# pyright: basic
"""The HTML page of `foveate rag`: questions, answers, times, and which tokens were recomputed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from foveate.apps.web.report import duration, render
from foveate.transformers.index import ChunkIndex
from foveate.transformers.rag import STEPS, Reply, Summary, summarise
from foveate.utils.device import dtype_name, versions

__all__ = ["reply_page", "summary_cells", "token_texts"]

SHADES = 10


class Word(NamedTuple):
    """A token on the page.

    Attributes:
        row: Row of the token in the context.
        gap: Whitespace before the token.
        text: Text of the token.
        score: Attention that the token receives from the prompt.
        shade: Shade of the background, 0 (none) to 9.
        recomputed: Whether the first method recomputed the token.
    """

    row: int
    gap: str
    text: str
    score: float
    shade: int
    recomputed: bool


def reply_page(index: ChunkIndex, replies: Sequence[Reply], settings: dict[str, str]) -> str:
    """One self-contained HTML page of questions, answers and recomputed tokens, without scripts or network access.

    Args:
        index: Index of the documents.
        replies: Questions and answers.
        settings: Further settings for the page, besides sizes, device and dtype.
    """
    settings = settings | {
        "documents": str(len(index.documents)),
        "passages": f"{len(index.passages)}, of at most {max(map(len, index.ids))} tokens",
        "device": str(index.encoder.device),
        "dtype": dtype_name(index.encoder.dtype),
    }
    shown = [(reply, _words(index, reply)) for reply in replies]
    summary = summary_cells(replies)
    return render("rag.html.j2", replies=shown, summary=summary, steps=STEPS, settings=settings, versions=versions())


def summary_cells(replies: Sequence[Reply]) -> list[list[str]]:
    """Cells of a table over all questions: column names, then a row for each method."""
    columns: dict[str, Callable[[Summary], str]] = {
        "method": lambda of: of.method,
        "right": lambda of: "" if of.accuracy is None else f"{100 * of.accuracy:.1f} %",
        "KL": lambda of: "" if of.divergence is None else f"{of.divergence:.2g}",
        "rows": lambda of: f"{100 * of.rows:.0f} %",
        "first token": lambda of: duration(of.first_token),
    }
    summaries = summarise(replies)
    shown = {name: cells for name, cell in columns.items() if any(cells := [cell(of) for of in summaries])}
    return [list(shown), *map(list, zip(*shown.values(), strict=True))]


def _words(index: ChunkIndex, reply: Reply) -> list[tuple[str, list[Word]]]:
    """The tokens of the prefix and of each passage, after its name."""
    tokenizer = index.encoder.tokenizer
    prefix = [tokenizer.decode([token]) for token in index.encoder.prefix.tolist()]
    texts = [("prefix", prefix)] if prefix else []
    for number in reply.passages:
        (name, text, _), ids = index.passages[number], index.ids[number]
        words = token_texts(tokenizer, text)  # of as many tokens, unless names of control tokens had to be spelled
        texts.append((name, words if len(words) == len(ids) else [tokenizer.decode([token]) for token in ids]))
    recomputed, scores = set(reply.answers[0].rows.tolist()), reply.scores.tolist()
    # the first passage holds tokens that draw attention in any text: relative to them all others would look pale
    peak = max(scores[reply.spans[0][1] :] or scores) or 1.0
    rows = iter(range(len(scores)))

    def word(text: str) -> Word:
        row, body = next(rows), text.lstrip() or text
        shade = min(SHADES - 1, int(SHADES * (scores[row] / peak) ** 0.5))
        return Word(row, text.removesuffix(body), body, scores[row], shade, row in recomputed)

    return [(name, [word(text) for text in words]) for name, words in texts]


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """The text of each token of a text, including the whitespace before it.

    If a character consists of several tokens, the first one has its text and the others are empty.
    """
    if not tokenizer.is_fast:
        return [tokenizer.decode([token]) for token in tokenizer(text, add_special_tokens=False).input_ids]
    texts, done = list[str](), 0
    for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping:
        texts.append(text[done:end])
        done = max(done, end)
    return texts
