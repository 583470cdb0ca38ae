# pyright: basic
"""Answers to questions about indexed documents, from cached chunks, by one or several methods."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill
from foveate.methods.recompute_policy import RecomputePolicy, Spans
from foveate.transformers.context import Context, Patched
from foveate.transformers.index import ChunkIndex
from foveate.transformers.retrieval import choose, words_of
from foveate.utils.timing import Stopwatch, now

__all__ = ["STEPS", "Answer", "Reply", "Summary", "ask", "runs", "summarise"]

STEPS = "load", "compose", "score", "recompute", "prompt", "decode"
"""Steps of an answer. All but the last come before the first token.

"recompute" includes the prompt, so that "prompt" is only the choice of the first token, except in a full prefill.
"""


class Answer(NamedTuple):
    """One method's answer to a question.

    Attributes:
        method: Name of the method.
        text: Generated text.
        seconds: Time of each of the method's `STEPS`.
        rows: Recomputed rows, numbered in the order of the reply's passages.
        order: Passage at each place of the context, as an index into the reply's passages.
        divergence: KL divergence of the next token from the full prefill, in nats. None if methods are not compared.
    """

    method: str
    text: str
    seconds: dict[str, float]
    rows: Int[Tensor, "rows"]
    order: tuple[int, ...]
    divergence: float | None

    @property
    def first_token(self) -> float:
        """Seconds until the first token."""
        return sum(taken for step, taken in self.seconds.items() if step != "decode")


class Reply(NamedTuple):
    """A question and its answers.

    Attributes:
        question: Text of the question.
        passages: Numbers of the passages in the context, in order.
        spans: First row of each passage, and the row after its last.
        answers: One answer for each method.
        scores: Attention that each row receives from the prompt before recomputation, the default score of
            `InfoFlowKV`.
        right: Right answers, if known.
    """

    question: str
    passages: list[int]
    spans: Spans
    answers: list[Answer]
    scores: Float[Tensor, "context"]
    right: tuple[str, ...] = ()

    def is_right(self, answer: Answer) -> bool:
        """Whether an answer contains one of the right answers, word for word."""
        words = f" {' '.join(words_of(answer.text))} "
        return any(f" {' '.join(words_of(right))} " in words for right in self.right)


class Summary(NamedTuple):
    """One method's answers to several questions.

    Attributes:
        method: Name of the method.
        accuracy: Fraction of right answers among the questions with known answers. None without such questions.
        divergence: Mean KL divergence of the next token from the full prefill, in nats. None if methods are not
            compared.
        first_token: Median time to the first token in seconds.
        rows: Mean fraction of recomputed rows.
    """

    method: str
    accuracy: float | None
    divergence: float | None
    first_token: float
    rows: float


def ask(
    index: ChunkIndex,
    question: str,
    methods: Mapping[str, RecomputePolicy],
    *,
    prompt: str,
    passages: Any = None,
    embed: str = "",
    top: int = 0,
    max_new_tokens: int = 64,
    advance: Callable[[], None] = lambda: None,
) -> Reply:
    """Greedy answers of each method to a question.

    Args:
        index: Index of the passages, built.
        question: Question to ask.
        methods: Methods by name. `FullPrefill` is the model alone, without any cache.
        prompt: Text after the passages, with {question} in it. Control tokens take effect only here.
        passages: Passages to read, in order: a list of passage numbers, of texts, or of documents of LangChain,
            LlamaIndex or Haystack; or a retriever of these libraries, or a function, that returns such a list for a
            question. New passages are added to the index, and so are encoded only once. By default all passages of
            the index that share a word with the question (BM25), in the order of the index; all passages if none does.
        embed: Model of sentence-transformers to rank the passages of the index instead of BM25.
        top: Largest number of passages; 0 takes as many as fit. The last of `passages`, or the lowest in rank, are
            left out.
        max_new_tokens: Largest number of tokens in an answer.
        advance: Called after each of the `runs`.

    Raises:
        ValueError: If there are no passages, one has the wrong type, or the first does not fit into the model's
            context.
    """
    encoder, compared = index.encoder, len(methods) > 1
    watch = Stopwatch(encoder.device)
    tokens = encoder.fill(prompt, {"{question}": question})
    used = len(encoder.prefix) + len(tokens) + max_new_tokens
    chosen = choose(index, question, used, passages=passages, embed=embed, top=top)
    with watch.step("load"):
        chunks = index.load(chosen)
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
    return Reply(question, chosen, context.spans, answers, scores.cpu())


def runs(methods: Mapping[str, RecomputePolicy]) -> int:
    """Number of runs for a question: a single method runs once; several methods run twice each, first as a warm-up."""
    return len(methods) * (2 if len(methods) > 1 else 1)


def summarise(replies: Sequence[Reply]) -> list[Summary]:
    """Summaries of the methods, over replies with the same methods."""
    known = [reply for reply in replies if reply.right]
    summaries: list[Summary] = []
    for i, first in enumerate(replies[0].answers):
        answers = [reply.answers[i] for reply in replies]
        summaries.append(
            Summary(
                first.method,
                fmean(reply.is_right(reply.answers[i]) for reply in known) if known else None,
                None if first.divergence is None else fmean(answer.divergence or 0.0 for answer in answers),
                median(answer.first_token for answer in answers),
                fmean(len(reply.answers[i].rows) / reply.spans[-1][1] for reply in replies),
            )
        )
    return summaries


def _answer(
    context: Context,
    prompt: list[int],
    name: str,
    method: RecomputePolicy,
    composed: dict[str, float],
    max_new_tokens: int,
    compared: bool = False,
) -> Answer:
    """A timed answer; `composed` holds the seconds of the steps that composed the context."""
    if isinstance(method, FullPrefill) and context.tokens.features is None:
        ids = torch.cat([context.ids, context.lm.tokens(prompt)])
        clock = _TokenClock(context.lm.device)
        (text,) = context.lm.generate([ids], max_new_tokens=max_new_tokens, streamer=clock)
        order, divergence = tuple(range(len(context.chunks))), 0.0 if compared else None
        return Answer(name, text, clock.seconds, torch.arange(len(context)), order, divergence)
    with context.patch(method, prompt) as patched:
        seconds = composed | patched.watch.seconds
        clock = _TokenClock(context.lm.device)
        text = patched.generate(max_new_tokens=max_new_tokens, streamer=clock)
        divergence = patched.fidelity() if compared else None
    return Answer(name, text, seconds | clock.seconds, _rows_in(context, patched), patched.order, divergence)


class _TokenClock:
    """A streamer for `model.generate` that times the first token and the rest, from its creation."""

    def __init__(self, device: torch.device) -> None:
        self._times = [now(device)]

    def put(self, tokens: Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        self._times.append(time.perf_counter())

    @property
    def seconds(self) -> dict[str, float]:
        began, _, first, *_, last = self._times  # a streamer gets the prompt before the first token
        return {"prompt": first - began, "decode": last - first}


def _rows_in(context: Context, patched: Patched) -> Int[Tensor, "rows"]:
    """Rows of a patch, numbered as in the context before its chunks were reordered."""
    rows = patched.rows.clone()
    for chunk, (start, stop) in zip(patched.order, patched.context.spans, strict=True):
        rows[(patched.rows >= start) & (patched.rows < stop)] += context.spans[chunk][0] - start
    return rows.sort().values
