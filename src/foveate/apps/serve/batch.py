# pyright: basic
"""Answers that are generated as one batch, which others join between tokens."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer, TopPLogitsWarper

from foveate.apps.serve.completion import Completion, Outcome
from foveate.apps.serve.question_queue import PendingQuestion
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkEncoder, Context
from foveate.transformers.context import patch_batch
from foveate.transformers.row_cache import RowCache

__all__ = ["Answer", "Batch", "Joining"]


class Joining(NamedTuple):
    """A question with its passages and the prompt that follows them.

    Attributes:
        question: The question.
        names: Names of the passages.
        context: The passages.
        prompt: Token ids of the prompt.
        new_tokens: Largest number of tokens in the answer.
    """

    question: PendingQuestion
    names: list[str]
    context: Context
    prompt: Int[Tensor, "_"]
    new_tokens: int


class Batch:
    """Answers that are generated together.

    Args:
        encoder: Model and tokenizer.
        method: Recompute policy.
    """

    def __init__(self, encoder: ChunkEncoder, method: RecomputePolicy) -> None:
        self._encoder, self._method = encoder, method
        ends = encoder.model.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self._answers: list[Answer] = []  # one for each row of the cache
        self._cache: Any = None

    @property
    def unfinished(self) -> list["Answer"]:
        """Answers that are not complete."""
        return [answer for answer in self._answers if not answer.ended]

    def fits(self, new: Sequence[tuple[int, int]]) -> bool:
        """Whether answers can join: the longest text plus the longest answer fits the model's context.

        A model without an end token answers one question at a time: `generate` could not pad answers that end early.

        Args:
            new: Number of tokens before each answer, and largest number of tokens in it.
        """
        sizes = [*new, *((answer.length, answer.left) for answer in self.unfinished)]
        longest = max(length for length, _ in sizes) + max(left for _, left in sizes)
        return len(sizes) == 1 or (longest <= self._encoder.max_tokens and self._ends != [None])

    def join(self, new: Sequence[Joining]) -> None:
        """Leave out finished answers, read the passages of new questions, and add their answers."""
        rows = [row for row, answer in enumerate(self._answers) if not answer.ended]
        answers = [self._answers[row] for row in rows]
        parts: list[tuple[RowCache, list[int]]] = [(self._cache, rows)] if rows else []
        if new:
            contexts, prompts = [each.context for each in new], [each.prompt for each in new]
            room = max(each.new_tokens for each in new)
            patched = patch_batch(contexts, prompts, [self._method] * len(new), room=room)
            parts.append((patched.cache, [*range(len(new))]))
            answers += [
                Answer(self._encoder.decoder, each, len(recomputed), self._ends)
                for each, recomputed in zip(new, patched.rows, strict=True)
            ]
        if len(parts) == 1 and len(answers) == parts[0][0].batch:
            self._cache = parts[0][0]
        elif parts:
            most = max(answer.length for answer in answers) + max(answer.left for answer in answers)
            self._cache = self._encoder.row_cache(len(answers), most).joined(parts)
            for cache, _ in parts:
                self._encoder.give_back(cache)
        self._answers = answers

    def generate(self, interrupted: Callable[[], bool]) -> None:
        """Generate until all answers are finished, or `interrupted` is true after a token."""
        self._encoder.generate(
            [answer.text_ids for answer in self._answers],
            self._cache,
            max_new_tokens=max(answer.left for answer in self._answers),
            logits_processor=[_SampleEach(self._answers)],
            stopping_criteria=[_StopEach(self._answers, interrupted)],
        )
        if self.unfinished:
            self._cache.advance(torch.tensor([answer.ids[-1:] for answer in self._answers]))
        else:
            self.close()

    def close(self) -> None:
        """End all answers, and let other batches use the memory."""
        if self._cache is not None:
            self._encoder.give_back(self._cache)
        self._answers, self._cache = [], None


class Answer(TextStreamer):
    """An answer during generation. Each word is emitted as soon as it is complete.

    Args:
        tokenizer: Tokenizer of the model.
        joining: The question with its passages.
        recomputed: Number of recomputed tokens.
        ends: Token ids that end an answer.

    Attributes:
        ids: Token ids so far.
        sample: Sampling by the options of the request; None is greedy.
    """

    def __init__(self, tokenizer: Any, joining: Joining, recomputed: int, ends: Sequence[int | None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._joining, self._recomputed, self._ends = joining, recomputed, ends
        self._before = torch.cat([joining.context.ids, joining.prompt])
        self.question, asked = joining.question, joining.question.asked
        self._stops, self._said, self._emitted, self._stopped = asked.stop, "", 0, False
        self.sample = _Sample(asked) if asked.temperature else None
        self.ids: list[int] = []

    @property
    def text_ids(self) -> Int[Tensor, "_"]:
        """Token ids of passages, prompt and answer so far."""
        return torch.cat([self._before, self._before.new_tensor(self.ids)])

    @property
    def length(self) -> int:
        """Number of tokens of passages, prompt and answer so far."""
        return len(self._before) + len(self.ids)

    @property
    def left(self) -> int:
        """Largest number of tokens that may follow."""
        return self._joining.new_tokens - len(self.ids)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, or the question was cancelled."""
        return bool(self.ids) and (
            self._stopped or self.ids[-1] in self._ends or self.left == 0 or self.question.outcome.cancelled()
        )

    def add(self, token: int) -> bool:
        """Append a token unless the answer has ended; returns whether it has ended."""
        if not self.ended:
            self.ids.append(token)
            self.put(torch.tensor([token]))
            if self.ended:
                self.end()
                self.question.finish(self._outcome())
        return self.ended

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Emit the text up to the first stop text. What may be the beginning of a stop text waits."""
        if self._stopped:
            return
        self._said = (self._said + text) if self._said else text.lstrip()
        self._stopped = (cut := _cut(self._said, self._stops)) is not None
        if cut is None:
            cut = len(self._said) - (0 if stream_end else _begun(self._said, self._stops))
        if new := self._said[self._emitted : cut]:
            self._emitted = cut
            self.question.emit(new)

    def _outcome(self) -> Outcome:
        decoded: Any = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        text: str = decoded.lstrip()
        finish = "stop" if self._stopped or self.ids[-1] in self._ends else "length"
        read = len(self._joining.context)
        tokens = len(self._before), read - self._recomputed, len(self.ids)
        return Outcome(self._joining.names, text[: _cut(text, self._stops)], finish, *tokens)


def _cut(text: str, stops: Sequence[str]) -> int | None:
    """Place of the first stop text."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that is the beginning of a stop text."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


class _StopEach(StoppingCriteria):
    """Appends the new token of each row to its answer, and stops rows with finished answers, or all."""

    def __init__(self, answers: Sequence[Answer], interrupted: Callable[[], bool]) -> None:
        self._answers, self._interrupted = answers, interrupted

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        ended = [answer.add(token) for answer, token in zip(self._answers, tokens, strict=True)]
        return torch.tensor(ended, device=input_ids.device) | self._interrupted()


class _SampleEach(LogitsProcessor):
    """Samples each row with its request's options; rows with temperature 0 stay greedy."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._samples = [answer.sample for answer in answers]

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        rows = zip(self._samples, scores[:, None], strict=True)
        return torch.cat([sample(input_ids, row) if sample else row for sample, row in rows])


class _Sample(LogitsProcessor):
    """Samples by the Gumbel-max trick, with a random generator for one request only."""

    def __init__(self, asked: Completion) -> None:
        self._temperature, self._top_p = asked.temperature, TopPLogitsWarper(asked.top_p)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbelow(2**63) if asked.seed is None else asked.seed)

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = self._top_p(input_ids, scores.float() / self._temperature)
        noise = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp_min(1e-300)
        return scores - (-noise.log()).log().to(scores)
