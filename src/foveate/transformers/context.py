# pyright: basic, reportPrivateImportUsage=false
"""A context composed of cached chunks: scored, patched for a prompt, and generated from."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foveate.methods.recompute_policy import ComposedCache, Geometry, Norm, RecomputePolicy
from foveate.transformers.cache import ComposedChunks, PatchedBatch, PromptedBatch, kv_deviation
from foveate.transformers.model import Text
from foveate.utils.choices import check_choice
from foveate.utils.device import Stopwatch

__all__ = ["Context", "Patched", "answers"]

ANSWER_ROWS = 128
"""Rows that a patched context has room for after the prompt; longer answers make room by a copy."""


class Context(ComposedChunks):
    """Chunks side by side, their keys rotated to their positions in the context; made by `ChunkEncoder.compose`.

    Nothing changes a context: patches have rows of their own. Any number of threads may ask it at a time.

    Attributes:
        lm: Language model and tokenizer.
        chunks: Chunks, in order.
        ids: Token ids of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        keys: Keys of each layer, [layers, 1, groups, rows, dim].
        values: Values of each layer, likewise.
    """

    def cache(self) -> DynamicCache:
        """All rows as a `DynamicCache`, for a forward pass or `model.generate`, which leave the rows unchanged."""
        return _dynamic_cache(self.keys, self.values)

    def score(
        self, prompt: Text, layers: Sequence[int], norm: Norm = "l2", geometry: Geometry = "global"
    ) -> Float[Tensor, "rows"]:
        """Attention that each row receives from a prompt after the context, averaged over these layers.

        Args:
            prompt: Text or token ids.
            layers: Layer numbers.
            norm: Norm over the tokens of the prompt.
            geometry: Positions of chunks and prompt while they are scored; see `InfoFlowKV`.

        Raises:
            ValueError: If the prompt is empty, or too long for the model's context, or the model does not have these
                layers, or norm or geometry are unknown.
        """
        ids = self._prompt(prompt)
        if not layers or not all(0 <= layer < len(self.keys) for layer in layers):
            raise ValueError(f"layers must be some of 0 to {len(self.keys) - 1}, not {list(layers)}")
        check_choice("norm", norm, Norm)
        check_choice("geometry", geometry, Geometry)
        return PromptedBatch([self], [ids]).score(tuple(layers), norm, geometry)[0]

    def kv_deviation(self, rank: Literal["v", "k"] = "v") -> Float[Tensor, "rows"]:
        """Mean square change of each row's values or keys in layer 1 when layers 0 and 1 are recomputed.

        Raises:
            ValueError: If the model has only one layer.
        """
        copy = self.lm.row_cache(1, len(self)).fill([(self.keys, self.values)])
        deviation = kv_deviation([self], copy, rank)[0]
        self.lm.give_back(copy)
        return deviation

    def recompute(self, rows: Int[Tensor, "chosen"], prompt: Text) -> "Patched":
        """Run these rows through all layers, each over all rows before it, and then the prompt.

        Args:
            rows: Row numbers, in any order.
            prompt: Text or token ids to generate from.

        Raises:
            ValueError: If the context does not have one of the rows, or the prompt is empty or too long.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise ValueError(
                f"rows are numbered from 0 to {len(self) - 1}, not {int(rows.min())} to {int(rows.max())}"
            )
        return self.patch(_Rows(rows.unique()), prompt)

    def patch(self, method: RecomputePolicy, prompt: Text, question: Text | None = None) -> "Patched":
        """Recompute the rows that the method chooses for this prompt, and then the prompt.

        Args:
            method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
            prompt: Text or token ids to generate from.
            question: Text or token ids to choose rows by, instead of the prompt. The authors' release chooses by the
                bare question, and generates from a prompt with instructions around it.

        Raises:
            ValueError: If the prompt is empty or too long.
        """
        ids, watch = self._prompt(prompt), Stopwatch(self.lm.device)
        asked = None if question is None else [self._prompt(question)]
        patched = PromptedBatch([self], [ids], asked).patch([method], watch, room=ANSWER_ROWS)
        return Patched(patched, watch)

    def answers(self, method: RecomputePolicy, prompts: Sequence[Text], **options: Any) -> list[str]:
        """The generated text for each prompt; options are those of the function `answers`."""
        return answers([self] * len(prompts), method, prompts, **options)

    def _prompt(self, prompt: Text) -> Int[Tensor, "prompt"]:
        ids = self.lm.tokens(prompt)
        if not len(ids):
            raise ValueError("the prompt is empty: pass a question")
        self.lm.check_length(len(self) + len(ids), "context and prompt", "compose fewer chunks")
        return ids


def answers(
    contexts: Sequence[Context],
    method: RecomputePolicy,
    prompts: Sequence[Text],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 32,
    **options: Any,
) -> list[str]:
    """The generated text for each prompt, which follows its own context: whole batches in one pass and one loop.

    Args:
        contexts: A context for each prompt. Lengths may differ, and a context may occur more than once.
        method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
        prompts: Text or token ids to generate from.
        batch_size: Largest number of prompts of a batch. Each has a copy of its context in memory.
        max_new_tokens: Largest number of tokens to generate.
        **options: Other options of `model.generate`. With `num_return_sequences`, so many texts for each prompt follow
            each other.

    Raises:
        ValueError: If contexts and prompts do not match, a prompt is empty or too long, or an option is not supported.
    """
    if isinstance(prompts, str):
        raise ValueError(f"pass a list of prompts, not one text: [{prompts[:20]!r}]")
    if len(contexts) != len(prompts) or len({id(context.lm) for context in contexts}) > 1:
        raise ValueError(
            f"{len(prompts)} prompts need a context each, of one encoder, not {len(contexts)} contexts of "
            f"{len({id(context.lm) for context in contexts})}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    ids = [context._prompt(prompt) for context, prompt in zip(contexts, prompts, strict=True)]
    texts: list[str] = []
    for start in range(0, len(ids), batch_size):
        some = slice(start, start + batch_size)
        prompted = PromptedBatch(contexts[some], ids[some])
        patched = prompted.patch([method] * len(prompted.prompts), room=max(max_new_tokens, ANSWER_ROWS))
        texts += patched.generate(max_new_tokens=max_new_tokens, **options)
        patched.close()
    return texts


@dataclass(frozen=True, eq=False)
class _Rows(RecomputePolicy):
    """The policy that recomputes these rows."""

    numbers: Int[Tensor, "rows"]

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        return self.numbers


class Patched:
    """A context with recomputed rows, and a prompt after it, from `Context.patch`. The context itself is unchanged.

    `close`, or the end of a `with` block, lets the next patch use its memory.

    Attributes:
        context: The context, or a new one with its chunks reordered if the method asked for that.
        prompt: Token ids of the prompt.
        order: Chunk at each place.
        rows: Rows that were recomputed, ascending.
        watch: Stopwatch with the steps "score" (choice and reordering), "recompute" (rows and prompt) and "generate".
    """

    def __init__(self, batch: PatchedBatch, watch: Stopwatch) -> None:
        self.context, self.watch = cast("Context", batch.contexts[0]), watch
        self.prompt, self.order, self.rows = batch.prompts[0], batch.orders[0], batch.rows[0]
        self._batch: PatchedBatch | None = batch
        self._lock = Lock()

    def __enter__(self) -> "Patched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the rows back. Nothing can be generated afterwards."""
        with self._lock:
            batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    @property
    def keys(self) -> Float[Tensor, "layers 1 groups rows dim"]:
        """A copy of the keys of each layer."""
        with self._lock:
            return self._open().cache.keys[..., : len(self.context), :].clone()

    @property
    def values(self) -> Float[Tensor, "layers 1 groups rows dim"]:
        """A copy of the values of each layer."""
        with self._lock:
            return self._open().cache.values[..., : len(self.context), :].clone()

    def cache(self) -> DynamicCache:
        """A copy of all rows as a `DynamicCache`, for a forward pass or `model.generate`."""
        return _dynamic_cache(self.keys, self.values)

    def generate(self, max_new_tokens: int = 32, do_sample: bool = False, **options: Any) -> str:
        """The text that `model.generate` continues with from the patched cache, greedy by default.

        Args:
            max_new_tokens: Largest number of tokens to generate.
            do_sample: Whether to sample tokens.
            **options: Other options of `model.generate`.

        Raises:
            ValueError: If the patch has been closed, context, prompt and answer may become too long for the model, or
                an option is not supported.
        """
        if options.get("num_return_sequences") not in (None, 1):
            raise ValueError("this gives one text: use context.answers(method, [prompt], num_return_sequences=...)")
        with self._lock, self.watch.step("generate"):
            return self._open().generate(max_new_tokens=max_new_tokens, do_sample=do_sample, **options)[0]

    def logits(self, last: int = 0) -> Float[Tensor, "last vocabulary"]:
        """Next-token logits after each of the last tokens of the prompt, or after all of them if `last` is 0.

        Raises:
            ValueError: If the patch has been closed.
        """
        with self._lock:
            return self._open().logits(last)[0]

    @torch.no_grad()
    def fidelity(self) -> float:
        """KL divergence in nats of the next token's distribution from that of a full prefill, which this computes.

        The mean over the tokens of the prompt; 0 means equal.

        Raises:
            ValueError: If the patch has been closed.
        """
        ours = self.logits().float().log_softmax(-1)
        ids = torch.cat([self.context.ids, self.prompt])[None]
        full = self.context.lm.model(input_ids=ids, logits_to_keep=len(self.prompt), use_cache=False).logits[0]
        p = full.float().log_softmax(-1)
        return float((p.exp() * (p - ours)).sum(-1).mean())

    def summary(self) -> str:
        """Number of recomputed rows of each chunk, and the time of each step."""
        times = ", ".join(f"{step} {1000 * taken:.1f} ms" for step, taken in self.watch.seconds.items())
        lines = [f"{len(self.rows)} of {len(self.context)} rows recomputed: {times}"]
        for chunk, (start, stop) in zip(self.order, self.context.spans, strict=True):
            rows = int(((self.rows >= start) & (self.rows < stop)).sum())
            lines.append(f"chunk {chunk}: {rows} of {stop - start}")
        return "\n".join(lines)

    def _open(self) -> PatchedBatch:
        if self._batch is None:
            raise ValueError("the patch has been closed: patch the context again")
        return self._batch


def _dynamic_cache(keys: Tensor, values: Tensor) -> DynamicCache:
    """The cache, its layers holding these keys and values without copying them. It grows by copies."""
    cache: Any = DynamicCache()  # with a config, sliding layers would keep no more than their window
    for key, value in zip(keys, values, strict=True):
        cache.layers.append(layer := DynamicLayer())
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache
