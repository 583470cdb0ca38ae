# pyright: basic
"""Questions about a folder of documents, answered from cached chunks by one method or several."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill
from foveate.methods.recompute_policy import RecomputePolicy, Spans
from foveate.transformers.context import Context
from foveate.transformers.documents import passages_of, shared_words
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.index import ChunkIndex
from foveate.transformers.patched import Patched
from foveate.utils.device import Stopwatch, now, versions
from foveate.web.report import render

__all__ = ["STEPS", "Answer", "Reply", "ask", "index_of", "reply_page"]

STEPS = "load", "compose", "score", "recompute", "prompt", "decode"
"""What an answer takes time for. Its first token is there before the last of them."""
SHADES = 10


class Answer(NamedTuple):
    """What a method made of a question.

    Attributes:
        method: Its name.
        text: The answer.
        seconds: By step, those of `STEPS` that there were.
        rows: The rows that were computed again, numbered as the passages stand in the `Reply`.
        order: Which passage of the reply stood at each place.
        divergence: KL divergence of the next token from the full prefill, in nats; None if it was not compared.
    """

    method: str
    text: str
    seconds: dict[str, float]
    rows: Int[Tensor, "rows"]
    order: tuple[int, ...]
    divergence: float | None

    @property
    def first_token(self) -> float:
        """Seconds until it is there."""
        return sum(taken for step, taken in self.seconds.items() if step != "decode")


class Reply(NamedTuple):
    """A question and its answers.

    Attributes:
        question: As asked.
        passages: Numbers of the passages in the context, in order.
        spans: Their rows: the first one and that behind the last.
        answers: One a method.
        scores: The attention that each row receives from the prompt before anything is computed again, as InfoFlow KV
            scores it by default.
    """

    question: str
    passages: list[int]
    spans: Spans
    answers: list[Answer]
    scores: Float[Tensor, "context"]


def index_of(folder: Path, encoder: ChunkEncoder, documents: Mapping[str, str], most: int | None = None) -> ChunkIndex:
    """The index of documents cut into passages, not built yet.

    Args:
        folder: Of its files.
        encoder: Of the model.
        documents: Texts by name.
        most: Tokens of a passage. 0 leaves documents whole; None is 512, or a quarter of the model's context.

    Raises:
        ValueError: If a passage has no tokens, or is longer than the model's context.
    """
    if most is None:
        most = min(512, encoder.model.config.max_position_embeddings // 4)
    passages = passages_of(
        documents, most, lambda text: len(encoder.tokenizer(text, add_special_tokens=False).input_ids)
    )
    return ChunkIndex(folder, encoder, passages)


def ask(
    index: ChunkIndex,
    question: str,
    methods: Mapping[str, RecomputePolicy],
    *,
    prompt: str,
    top: int = 0,
    max_new_tokens: int = 64,
    advance: Callable[[], None] = lambda: None,
) -> Reply:
    """The answers of each method to a question, greedy.

    A single method runs once. Several are compared: each runs once to warm up, and is timed then.

    Args:
        index: Of the passages, built.
        question: To ask.
        methods: What to compute again, by name. `FullPrefill` is the model alone, without any cache.
        prompt: What stands behind the passages, with {question} in it.
        top: Most passages to take; 0 takes all that fit. What is left out is what shares least with the question.
        max_new_tokens: Most tokens of an answer.
        advance: Called behind each answer.

    Raises:
        ValueError: If there are no passages, or not even one fits into the model's context.
    """
    if not index.passages:
        raise ValueError("the index has no passages: give it one at least")
    encoder, compared = index.encoder, len(methods) > 1
    watch = Stopwatch(encoder.device)
    tokens = encoder.tokens(prompt.replace("{question}", question)).tolist()
    passages = _choose(index, question, len(encoder.prefix) + len(tokens) + max_new_tokens, top)
    with watch.step("load"):
        chunks = index.load(passages)
    if compared:
        encoder.compose(chunks)  # warms up
    with watch.step("compose"):
        context = encoder.compose(chunks)
    answers: list[Answer] = []
    for name, method in methods.items():
        if compared:
            _answer(context, tokens, name, method, watch.seconds, max_new_tokens)
            advance()
        answers.append(_answer(context, tokens, name, method, watch.seconds, max_new_tokens, compared))
        advance()
    scores = context.score(tokens, InfoFlowKV().layers(len(context.keys)))
    return Reply(question, passages, context.spans, answers, scores.cpu())


class Word(NamedTuple):
    """A token on the page.

    Attributes:
        row: Its number in the context.
        gap: What stands between it and the one before.
        text: Its text.
        score: The attention that it receives from the prompt.
        shade: 0, for the least, to 9.
        again: Whether it was computed again.
    """

    row: int
    gap: str
    text: str
    score: float
    shade: int
    again: bool


def reply_page(index: ChunkIndex, replies: Sequence[Reply], settings: dict[str, str]) -> str:
    """One HTML page of questions and answers, with what was computed again; no other file, no script, no network."""
    shown = [(reply, _words(index, reply)) for reply in replies]
    return render("rag.html.j2", replies=shown, steps=STEPS, settings=settings, versions=versions())


def _words(index: ChunkIndex, reply: Reply) -> dict[str, list[Word]]:
    """The tokens of the prefix and of each passage, by name; marked are those that the first answer computed again."""
    prefix = [index.encoder.tokenizer.decode([token]) for token in index.encoder.prefix.tolist()]
    texts = {"in front of everything": prefix} if prefix else {}
    texts |= {index.passages[passage].name: index.words(passage) for passage in reply.passages}
    again, scores = set(reply.answers[0].rows.tolist()), reply.scores.tolist()
    # the first passage holds the tokens that draw attention wherever they stand: they would bleach all others
    peak = max(scores[reply.spans[0][1] :] or scores) or 1.0
    rows = iter(range(len(scores)))

    def word(text: str) -> Word:
        row, body = next(rows), text.lstrip() or text
        shade = min(SHADES - 1, int(SHADES * (scores[row] / peak) ** 0.5))
        return Word(row, text.removesuffix(body), body, scores[row], shade, row in again)

    return {name: [word(text) for text in words] for name, words in texts.items()}


def _choose(index: ChunkIndex, question: str, taken: int, top: int) -> list[int]:
    """The passages that share most words with the question, as many as fit behind `taken` tokens, in order."""
    most = index.encoder.model.config.max_position_embeddings
    scores = shared_words(question, [passage.text for passage in index.passages])
    chosen: list[int] = []
    for passage in sorted(range(len(scores)), key=lambda passage: -scores[passage])[: top or None]:
        taken += len(index.ids[passage])
        if taken > most:
            break
        chosen.append(passage)
    if not chosen:
        raise ValueError(
            f"{index.passages[passage].name} with prompt and answer takes {taken} tokens, where the model takes "
            f"{most}: use smaller chunks, a shorter question, or fewer new tokens"
        )
    return sorted(chosen)


def _answer(
    context: Context,
    tokens: list[int],
    name: str,
    method: RecomputePolicy,
    before: dict[str, float],
    max_new_tokens: int,
    compared: bool = False,
) -> Answer:
    """By one method, timed; `before` is what its context took."""
    encoder = context.encoder
    if isinstance(method, FullPrefill):
        ids = torch.cat([context.ids, encoder.tokens(tokens)])
        text = encoder.generate(ids, max_new_tokens=max_new_tokens, streamer=(clock := _Tokens(encoder.device)))
        order, divergence = tuple(range(len(context.chunks))), 0.0 if compared else None
        return Answer(name, text, clock.seconds, torch.arange(len(context)), order, divergence)
    with context.patch(method, tokens) as patched:
        steps = before | patched.watch.seconds
        text = patched.generate(max_new_tokens=max_new_tokens, streamer=(clock := _Tokens(encoder.device)))
        divergence = patched.fidelity() if compared else None
    return Answer(name, text, steps | clock.seconds, _at_home(patched, context.spans), patched.order, divergence)


class _Tokens:
    """A streamer of `model.generate` that times the first token and the others."""

    def __init__(self, device: torch.device) -> None:
        self._times = [now(device)]

    def put(self, tokens: Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> dict[str, float]:
        began, _, first, *_, last = self._times  # the first that it is given is the prompt
        return {"prompt": first - began, "decode": last - first}


def _at_home(patched: Patched, spans: Spans) -> Int[Tensor, "rows"]:
    """The rows of a patch as they are numbered before chunks were moved."""
    rows = patched.rows.clone()
    for chunk, (start, stop) in zip(patched.order, patched.context.spans, strict=True):
        rows[(patched.rows >= start) & (patched.rows < stop)] += spans[chunk][0] - start
    return rows.sort().values
