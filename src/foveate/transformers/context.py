# pyright: basic, reportPrivateImportUsage=false
"""Contexts composed of cached chunks: scoring, recomputation for a prompt, and generation."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from foveate.methods.recompute_policy import FixedRows, Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.rotary import copy_rows
from foveate.transformers.attention import CACHE
from foveate.transformers.chunk import ChunkCache
from foveate.transformers.model import LanguageModel, Text
from foveate.transformers.row_cache import Filling, RowCache
from foveate.transformers.tokens import Tokens
from foveate.utils.choices import check_choice
from foveate.utils.timing import Stopwatch

__all__ = ["Context", "Patched", "PatchedBatch", "answers", "patch_batch"]

ANSWER_ROWS = 128
"""Room of a patched context after the prompt, in rows; longer answers copy the cache."""


class Context:
    """Chunks side by side, their keys rotated to their positions in the context; made by `ChunkEncoder.compose`.

    A context never changes: patches copy its rows. Any number of threads may use it at the same time.

    Attributes:
        lm: Language model and tokenizer.
        chunks: Chunks, in order.
        tokens: Tokens of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        end: Position of the first token after the context.
        rows: Rows whose keys and values this process keeps: all, unless several processes divide the context.
        keys: Keys of these rows.
        values: Values of these rows.
    """

    tokens: Tokens
    keys: Float[Tensor, "layers 1 groups rows dim"]
    values: Float[Tensor, "layers 1 groups rows dim"]

    def __init__(self, lm: LanguageModel, chunks: Sequence[ChunkCache]) -> None:
        self.lm, self.chunks = lm, tuple(chunks)
        self._parts = [chunk.tokens.on_axes(lm.axes) for chunk in chunks]
        self.spans = self._spans(map(len, self._parts))
        kept = [torch.arange(start, stop) for _, start, stop in self._kept()]
        self.rows = torch.cat(kept) if kept else torch.arange(0)
        self.tokens, self.end = self.placed("global")
        self.keys = self.keys_at(self.tokens.positions)
        self.values = self._concatenated("values", [(slice(None),)])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> Int[Tensor, "rows"]:
        """Token ids of all rows, prefix first."""
        return self.tokens.ids

    def _spans(self, lengths: Iterable[int]) -> Spans:
        return tuple(pairwise(accumulate(lengths, initial=len(self.lm.prefix))))

    def placed(self, geometry: Geometry) -> tuple[Tokens, int]:
        """Tokens at the positions of this geometry, and the position of the first token after them."""
        extents = self._spans(part.extent for part in self._parts)
        positions, end = places(geometry, extents)
        starts = [int(positions[start]) for start, _ in extents]
        parts = [part.moved(start) for part, start in zip(self._parts, starts, strict=True)]
        return Tokens.joined([Tokens.text(self.lm.prefix, self.lm.axes), *parts]), end

    @torch.no_grad()
    def keys_at(self, positions: Int[Tensor, "*axes rows"]) -> Float[Tensor, "layers 1 groups rows dim"]:
        """Keys rotated to these positions in float32 or wider."""
        return self._concatenated("keys", self.lm.rotations(positions))

    def _kept(self) -> Iterator[tuple[ChunkCache, int, int]]:
        """Chunks that this process keeps, each with its first row and the row after its last; one has the prefix."""
        process = self.lm.division and self.lm.division.rank
        for number, (chunk, (start, stop)) in enumerate(zip(self.chunks, self.spans, strict=True)):
            if chunk.holder == process:
                yield chunk, start if number else 0, stop

    def whole(self, states: Tensor, dim: int) -> Tensor:
        """Keys, values or scores of all rows, collected from the processes that keep them."""
        division = self.lm.division
        return states if division is None else division.whole(states, self.rows, len(self), dim)

    def filling(self, geometry: Geometry = "global") -> Filling:
        """Content of a `RowCache`, with keys at the positions of this geometry."""
        if geometry == "global":
            return Filling(self.keys, self.values, self.rows, len(self), self.end)
        tokens, end = self.placed(geometry)
        return Filling(self.keys_at(tokens.positions), self.values, self.rows, len(self), end)

    def _concatenated(
        self, name: str, rotations: Sequence[tuple[Any, ...]]
    ) -> Float[Tensor, "layers 1 groups rows dim"]:
        """Keys or values of the chunks that this process keeps, side by side after one prefix."""
        whole = torch.empty(self.lm.cache_shape(1, len(self.rows)), dtype=self.lm.dtype, device=self.lm.device)
        first, order = 0, self.lm.pair_order
        for chunk, start, stop in self._kept():
            states = getattr(chunk, name)[:, :, len(self.lm.prefix) if start else 0 :]
            last = first + stop - start
            for run, *tables in rotations:
                some = [table[start:stop] for table in tables]
                if order is None or not tables:
                    copy_rows(whole[run, 0, :, first:last], states[run], *some)
                else:
                    copy_rows(whole[run, 0, :, first:last], states[run][..., order], *some)
                    whole[run, 0, :, first:last] = whole[run, 0, :, first:last][..., order.argsort()]
            first = last
        return whole

    def reordered(self, order: Sequence[int]) -> "Context":
        """A context with the same chunks in this order."""
        return self if list(order) == sorted(order) else Context(self.lm, [self.chunks[i] for i in order])

    def cache(self) -> DynamicCache:
        """A copy of all rows as a `DynamicCache`, for a forward pass or `model.generate`."""
        # with a config, sliding layers would keep no more than their window
        return DynamicCache(zip(*(self.whole(states, 3) for states in (self.keys, self.values)), strict=True))

    def score(
        self, prompt: Text, layers: Sequence[int], norm: Norm = "l2", geometry: Geometry = "global"
    ) -> Float[Tensor, "rows"]:
        """Attention that each row receives from a prompt after the context, averaged over these layers.

        Args:
            prompt: Text or token ids.
            layers: Layer numbers.
            norm: Norm over the tokens of the prompt.
            geometry: Positions of chunks and prompt during scoring; see `InfoFlowKV`.

        Raises:
            ValueError: If the prompt is empty or too long for the model's context, the model lacks one of the layers,
                or norm or geometry are unknown.
        """
        ids = self._prompt(prompt)
        if not layers or not all(0 <= layer < len(self.keys) for layer in layers):
            raise ValueError(f"layers must be some of 0 to {len(self.keys) - 1}, not {list(layers)}")
        check_choice("norm", norm, Norm)
        check_choice("geometry", geometry, Geometry)
        cache = self.lm.row_cache(1, len(self) + len(ids))
        scores = _ComposedBatch([self], [ids], cache).received(tuple(layers), norm, geometry)
        self.lm.give_back(cache)
        return scores[0, : len(self)]

    def recompute(self, rows: Int[Tensor, "chosen"], prompt: Text) -> "Patched":
        """Recompute these rows in all layers, each over all rows before it, and then the prompt.

        Args:
            rows: Row numbers, in any order.
            prompt: Text or token ids to generate from.

        Raises:
            ValueError: If the context lacks one of the rows, or the prompt is empty or too long.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise ValueError(
                f"rows are numbered from 0 to {len(self) - 1}, not {int(rows.min())} to {int(rows.max())}"
            )
        return self.patch(FixedRows(rows.unique()), prompt)

    def patch(self, method: RecomputePolicy, prompt: Text, question: Text | None = None) -> "Patched":
        """Recompute the rows that the method chooses for this prompt, and then the prompt.

        Args:
            method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
            prompt: Text or token ids to generate from.
            question: Text or token ids to choose rows by, instead of the prompt. The authors' code chooses by the
                question alone, and generates from a prompt with instructions around it.

        Raises:
            ValueError: If the prompt is empty or too long.
        """
        ids, watch = self._prompt(prompt), Stopwatch(self.lm.device)
        questions = None if question is None else [self._prompt(question)]
        patched = patch_batch([self], [ids], [method], questions=questions, watch=watch, room=ANSWER_ROWS)
        return Patched(patched, watch)

    def answers(self, method: RecomputePolicy, prompts: Sequence[Text], **options: Any) -> list[str]:
        """Generated text for each prompt; see the function `answers` for the options."""
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
    """Generated text for each prompt after its context, computed in batches.

    Args:
        contexts: A context for each prompt. Lengths may differ, and a context may occur more than once.
        method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
        prompts: Text or token ids to generate from.
        batch_size: Largest number of prompts of a batch. Each has a copy of its context in memory. Processes that
            divide their contexts take one prompt at a time.
        max_new_tokens: Largest number of tokens to generate.
        **options: Other options of `model.generate`. With `num_return_sequences`, the texts for a prompt are adjacent.

    Raises:
        ValueError: If contexts and prompts do not match, a prompt is empty or too long, or an option is not supported.
    """
    if isinstance(prompts, str):
        raise ValueError(f"pass a list of prompts, not one text: [{prompts[:20]!r}]")
    if len(contexts) != len(prompts) or len({id(context.lm) for context in contexts}) > 1:
        raise ValueError(
            f"{len(prompts)} prompts need one context each, of one encoder, not {len(contexts)} contexts of "
            f"{len({id(context.lm) for context in contexts})}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    ids = [context._prompt(prompt) for context, prompt in zip(contexts, prompts, strict=True)]
    texts: list[str] = []
    if contexts and contexts[0].lm.division is not None:
        batch_size = 1
    for start in range(0, len(ids), batch_size):
        some = slice(start, start + batch_size)
        methods, room = [method] * len(ids[some]), max(max_new_tokens, ANSWER_ROWS)
        patched = patch_batch(contexts[some], ids[some], methods, room=room)
        texts += patched.generate(max_new_tokens=max_new_tokens, **options)
        patched.close()
    return texts


class Patched:
    """A context with recomputed rows, and a prompt after it, from `Context.patch`. The context itself is unchanged.

    `close`, or the end of a `with` block, lets the next patch use its memory.

    Attributes:
        context: The context, or a new one with reordered chunks if the method reorders them.
        prompt: Token ids of the prompt.
        order: Chunk at each place.
        rows: Recomputed rows, ascending.
        watch: Stopwatch with the steps "score" (choice and reordering), "recompute" (rows and prompt) and "generate".
    """

    def __init__(self, batch: "PatchedBatch", watch: Stopwatch) -> None:
        self.context, self.watch = batch.contexts[0], watch
        self.prompt, self.order, self.rows = batch.prompts[0], batch.orders[0], batch.rows[0]
        self._batch: PatchedBatch | None = batch
        self._lock = Lock()

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Return the cache for reuse. The patch cannot be used afterwards."""
        with self._lock:
            batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def cache(self) -> DynamicCache:
        """A copy of the context's rows as a `DynamicCache`, for a forward pass or `model.generate`.

        Raises:
            ValueError: If the patch has been closed.
        """
        with self._lock:
            rows = self._open().cache
            kept = (x[..., : len(self.context.rows), :] for x in (rows.keys, rows.values))
            states = (self.context.whole(x, 3) for x in kept)
            return DynamicCache(zip(*states, strict=True))

    def generate(self, max_new_tokens: int = 32, do_sample: bool = False, **options: Any) -> str:
        """Text generated by `model.generate` from the patched cache, greedy by default.

        Args:
            max_new_tokens: Largest number of tokens to generate.
            do_sample: Whether to sample tokens.
            **options: Other options of `model.generate`.

        Raises:
            ValueError: If the patch has been closed, context, prompt and answer may exceed the model's context, or an
                option is not supported.
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
        """KL divergence of the next-token distribution from the full prefill, in nats; it runs the full prefill.

        The mean over the tokens of the prompt; 0 means equal.

        Raises:
            ValueError: If the patch has been closed.
        """
        ours = self.logits().float().log_softmax(-1)
        context, lm = self.context, self.context.lm
        if context.tokens.features is None:
            ids = torch.cat([context.ids, self.prompt])[None]
            full = lm.model(input_ids=ids, logits_to_keep=len(self.prompt), use_cache=False).logits[0]
        else:
            every = patch_batch([context], [self.prompt], [FixedRows(torch.arange(len(context)))])
            full = every.logits()[0]
            every.close()
        p = full.float().log_softmax(-1)
        return max(float((p.exp() * (p - ours)).sum(-1).mean()), 0.0)  # rounding may take it below

    def summary(self) -> str:
        """Number of recomputed rows of each chunk, and the time of each step."""
        times = ", ".join(f"{step} {1000 * taken:.1f} ms" for step, taken in self.watch.seconds.items())
        lines = [f"{len(self.rows)} of {len(self.context)} rows recomputed: {times}"]
        for chunk, (start, stop) in zip(self.order, self.context.spans, strict=True):
            rows = int(((self.rows >= start) & (self.rows < stop)).sum())
            lines.append(f"chunk {chunk}: {rows} of {stop - start}")
        return "\n".join(lines)

    def _open(self) -> "PatchedBatch":
        if self._batch is None:
            raise ValueError("the patch has been closed: patch the context again")
        return self._batch


class PatchedBatch(NamedTuple):
    """A batch of contexts with recomputed rows, and a prompt after each.

    Attributes:
        contexts: The unchanged contexts, with reordered chunks where the policy reorders them.
        prompts: Token ids of one prompt for each context.
        orders: Chunk at each place, for each context.
        rows: Numbers of the recomputed rows of each context, ascending.
        cache: Keys and values.
    """

    contexts: list[Context]
    prompts: list[Int[Tensor, "_"]]
    orders: list[tuple[int, ...]]
    rows: list[Int[Tensor, "_"]]
    cache: RowCache

    @torch.no_grad()
    def logits(self, last: int = 0) -> list[Float[Tensor, "_ vocabulary"]]:
        """Next-token logits after each of the last tokens of the prompts, or after all of them if `last` is 0."""
        self.cache.rewind()
        ids = pad_sequence(self.prompts, batch_first=True)
        logits = self.cache.model(input_ids=ids, **{CACHE: self.cache}, logits_to_keep=last).logits
        return [row[-(last or len(ids)) :] for row, ids in zip(logits, self.prompts, strict=True)]

    def generate(self, **options: Any) -> list[str]:
        """`LanguageModel.generate` after each prompt."""
        ids = [torch.cat([context.ids, prompt]) for context, prompt in zip(self.contexts, self.prompts, strict=True)]
        return self.contexts[0].lm.generate(ids, self.cache, **options)

    def close(self) -> None:
        """Let other patches use the memory."""
        self.contexts[0].lm.give_back(self.cache)


def patch_batch(
    contexts: Sequence[Context],
    prompts: Sequence[Int[Tensor, "_"]],
    policies: Sequence[RecomputePolicy],
    *,
    questions: Sequence[Int[Tensor, "_"]] | None = None,
    watch: Stopwatch | None = None,
    room: int = 0,
) -> PatchedBatch:
    """Recompute the rows chosen by each policy, and a prompt after each context, in one forward pass.

    Args:
        contexts: Contexts of one language model. Lengths may differ, and a context may occur more than once.
        prompts: Token ids of one prompt for each context.
        policies: One policy for each context, all of one class, since `CacheBlend` recomputes layers of all contexts.
        questions: Token ids to choose rows by, instead of the prompts.
        watch: Stopwatch for the steps "score" (choice and reordering) and "recompute" (rows and prompts).
        room: Number of rows to make room for after the prompts.
    """
    contexts, prompts, lm = list(contexts), list(prompts), contexts[0].lm
    questions, watch = questions or prompts, watch or Stopwatch(lm.device)
    with watch.step("score"):
        longest = max(map(len, [*prompts, *questions]))
        cache = lm.row_cache(len(contexts), max(map(len, contexts)) + longest + room)
        stale = _ComposedBatch(contexts, questions, cache)
        orders = [policy.arrange(context) for policy, context in zip(policies, stale.each(), strict=True)]
        reordered = [context.reordered(order) for context, order in zip(contexts, orders, strict=True)]
        if reordered != contexts:
            stale = _ComposedBatch(reordered, questions, cache)
        rows = [policy.rows(context) for policy, context in zip(policies, stale.each(), strict=True)]
    with watch.step("recompute"):
        chosen = [some.to(lm.device) for some in rows]
        cache.repair([context.tokens for context in reordered], chosen, prompts)
    return PatchedBatch(reordered, prompts, orders, [some.cpu() for some in rows], cache)


class _ComposedBatch:
    """A copy of contexts before recomputation, from which policies choose rows.

    Scores requested by the first policy are computed for all contexts at once.
    """

    def __init__(self, contexts: list[Context], questions: Sequence[Int[Tensor, "_"]], cache: RowCache) -> None:
        self.contexts, self.questions, self.cache = contexts, questions, cache
        self._scores: dict[Any, Tensor] = {}
        self._deviations: dict[str, list[Tensor]] = {}
        self._fill()

    def _fill(self) -> None:
        self.cache.fill(context.filling() for context in self.contexts)

    def each(self) -> list["_ComposedContext"]:
        """One view of each context, for its policy."""
        return [_ComposedContext(self, number) for number in range(len(self.contexts))]

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "batch capacity"]:
        """Attention that each row receives from the question after its context. The copy stays unchanged."""
        how = layers, norm, geometry
        if how not in self._scores:
            moved = [context.filling(geometry) for context in self.contexts]
            if geometry != "global":
                self.cache.fill(moved)
            self._scores[how] = self.cache.received(self.questions, [each.position for each in moved], layers, norm)
            if geometry != "global":
                self._fill()
        return self._scores[how]

    def kv_deviation(self, rank: Literal["v", "k"]) -> list[Float[Tensor, "_"]]:
        """Mean squared change of each row's values or keys in layer 1. Overwrites layers 0 and 1.

        Raises:
            ValueError: If the model has only one layer.
        """
        if len(self.cache.keys) < 2:
            raise ValueError("CacheBlend ranks rows by layer 1, but the model has only layer 0: use InfoFlowKV")
        if rank not in self._deviations:
            # rows after the end of a shorter context are not in use yet
            self.cache.overwrite_first([context.tokens for context in self.contexts], last=1)
            name = "values" if rank == "v" else "keys"
            self._deviations[rank] = []
            for context, new in zip(self.contexts, getattr(self.cache, name)[1], strict=True):
                old = getattr(context, name)[1, 0]
                changes = (new[:, : old.shape[1]] - old).float().square().mean((0, 2))
                self._deviations[rank].append(context.whole(changes, 0))
        return self._deviations[rank]


class _ComposedContext(NamedTuple):
    """One context of a batch for a policy: a `foveate.methods.recompute_policy.ComposedCache`."""

    batch: _ComposedBatch
    number: int

    @property
    def spans(self) -> Spans:
        return self.batch.contexts[self.number].spans

    @property
    def layers(self) -> int:
        return len(self.batch.cache.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        return self.batch.received(layers, norm, geometry)[self.number, : self.spans[-1][1]]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        return self.batch.kv_deviation(rank)[self.number]
