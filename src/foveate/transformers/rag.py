# pyright: basic
"""Questions about indexed documents, answered from cached chunks by one method or several."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill
from foveate.methods.recompute_policy import RecomputePolicy, Spans
from foveate.transformers.context import Context, Patched
from foveate.transformers.documents import bm25_scores
from foveate.transformers.index import ChunkIndex
from foveate.utils.device import Stopwatch, now

__all__ = ["STEPS", "Answer", "Reply", "ask"]

STEPS = "load", "compose", "score", "recompute", "prompt", "decode"
"""Steps of an answer. The first token is there after all of them but the last.

"recompute" includes the prompt, so that "prompt" is only the choice of the first token, except in a full prefill.
"""


class Answer(NamedTuple):
    """One method's answer to a question.

    Attributes:
        method: Name of the method.
        text: Generated text.
        seconds: Time of each of the `STEPS` that the method has.
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
        question: Question as asked.
        passages: Numbers of the passages in the context, in order.
        spans: First row of each passage, and the row after its last.
        answers: One answer for each method.
        scores: Attention that each row receives from the prompt before anything is recomputed, as `InfoFlowKV` scores
            rows by default.
    """

    question: str
    passages: list[int]
    spans: Spans
    answers: list[Answer]
    scores: Float[Tensor, "context"]


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
    """Greedy answers of each method to a question.

    A single method runs once. Several methods run twice each, the first time to warm up.

    Args:
        index: Index of the passages, built.
        question: Question to ask.
        methods: Methods by name. `FullPrefill` is the model alone, without any cache.
        prompt: Text after the passages, with {question} in it.
        top: Largest number of passages; 0 takes as many as fit. Those with the lowest BM25 scores are left out.
        max_new_tokens: Largest number of tokens in an answer.
        advance: Called after each run.

    Raises:
        ValueError: If the index has no passages, or not even one fits into the model's context.
    """
    if not index.passages:
        raise ValueError("the index has no passages: add at least one")
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


def _choose(index: ChunkIndex, question: str, used: int, top: int) -> list[int]:
    """The passages with the highest BM25 scores, in order: as many as fit beside `used` tokens."""
    limit = index.encoder.model.config.max_position_embeddings
    scores = bm25_scores(question, [passage.text for passage in index.passages])
    chosen: list[int] = []
    for passage in sorted(range(len(scores)), key=lambda passage: -scores[passage])[: top or None]:
        used += len(index.ids[passage])
        if used > limit:
            break
        chosen.append(passage)
    if not chosen:
        raise ValueError(
            f"{index.passages[passage].name} with prompt and answer takes {used} tokens, but the model takes at most "
            f"{limit}: use smaller chunks, a shorter question, or fewer new tokens"
        )
    return sorted(chosen)


def _answer(
    context: Context,
    prompt: list[int],
    name: str,
    method: RecomputePolicy,
    composed: dict[str, float],
    max_new_tokens: int,
    compared: bool = False,
) -> Answer:
    """A timed answer; `composed` are the seconds of the steps that made the context."""
    if isinstance(method, FullPrefill):
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
    """A streamer for `model.generate` that times the first token and the rest, from its creation on."""

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
