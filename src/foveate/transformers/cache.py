# pyright: basic, reportPrivateImportUsage=false
"""Contexts that are composed of cached chunks, and batches of copies that are repaired, each for a prompt."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.rotary import copy_rows
from foveate.transformers.chunk import ChunkCache
from foveate.transformers.model import LanguageModel
from foveate.transformers.row_cache import RowCache
from foveate.utils.device import Stopwatch

__all__ = ["ComposedChunks", "PatchedBatch", "PromptedBatch", "kv_deviation"]


class ComposedChunks:
    """Chunks side by side after one prefix, their keys rotated to their positions in the context.

    Nothing changes it after it has been composed, so that any number of threads may use it.

    Args:
        lm: Language model that the chunks are from.
        chunks: Chunks, in order.

    Attributes:
        ids: Token ids of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        keys: Keys.
        values: Values.
    """

    ids: Int[Tensor, "rows"]
    keys: Float[Tensor, "layers 1 groups rows dim"]
    values: Float[Tensor, "layers 1 groups rows dim"]

    def __init__(self, lm: LanguageModel, chunks: Sequence[ChunkCache]) -> None:
        self.lm, self.chunks = lm, tuple(chunks)
        self.ids = torch.cat([lm.prefix, *(chunk.ids for chunk in chunks)])
        lengths = [len(chunk.ids) for chunk in chunks]
        self.spans: Spans = tuple(pairwise(accumulate(lengths, initial=len(lm.prefix))))
        self.keys = self.keys_at(torch.arange(len(self)))
        self.values = self._concatenated("values", [(slice(None),)])

    def __len__(self) -> int:
        return len(self.ids)

    @torch.no_grad()
    def keys_at(self, positions: Int[Tensor, "rows"]) -> Float[Tensor, "layers 1 groups rows dim"]:
        """Keys rotated to these positions in float32 or wider."""
        return self._concatenated("keys", self.lm.rotations(positions))

    def _concatenated(
        self, name: str, rotations: Sequence[tuple[Any, ...]]
    ) -> Float[Tensor, "layers 1 groups rows dim"]:
        """Keys or values of the chunks side by side after one prefix."""
        first = getattr(self.chunks[0], name)
        layers, groups, _, dim = first.shape
        whole = first.new_empty(layers, 1, groups, len(self), dim)
        start = 0
        for chunk in self.chunks:
            states = getattr(chunk, name)[:, :, len(self.lm.prefix) if start else 0 :]
            stop = start + states.shape[2]
            for run, *tables in rotations:
                copy_rows(whole[run, 0, :, start:stop], states[run], *(table[start:stop] for table in tables))
            start = stop
        return whole

    def reordered(self, order: Sequence[int]) -> "ComposedChunks":
        """The same context with its chunks in this order."""
        return self if list(order) == sorted(order) else type(self)(self.lm, [self.chunks[i] for i in order])


class PromptedBatch:
    """A batch of contexts with a prompt after each. Lengths may differ, and a context may occur more than once.

    Args:
        contexts: Contexts of one language model.
        prompts: Token ids of one prompt for each context.
        questions: Token ids to choose rows by, instead of the prompts.
    """

    def __init__(
        self,
        contexts: Sequence[ComposedChunks],
        prompts: Sequence[Int[Tensor, "_"]],
        questions: Sequence[Tensor] | None = None,
    ) -> None:
        self.contexts, self.prompts = list(contexts), list(prompts)
        self._questions = self.prompts if questions is None else list(questions)
        self._scores: dict[Any, Tensor] = {}

    def score(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> list[Float[Tensor, "_"]]:
        """`Context.score` of each context, for one prompt each."""
        copy = self._copy(0)
        scores = self._received(copy, layers, norm, geometry)
        self.contexts[0].lm.give_back(copy)
        return [row[: len(context)] for row, context in zip(scores, self.contexts, strict=True)]

    def patch(
        self, policies: Sequence[RecomputePolicy], watch: Stopwatch | None = None, room: int = 0
    ) -> "PatchedBatch":
        """The contexts with the rows recomputed that each policy chooses.

        Args:
            policies: One policy for each context, all of one kind, because `CacheBlend` recomputes layers of all of
                them.
            watch: Stopwatch for the steps "score" (choice and reordering) and "recompute" (rows and prompts).
            room: Number of rows to make room for after the prompts.
        """
        batch, watch = self, watch or Stopwatch(self.contexts[0].lm.device)
        with watch.step("score"):
            copy = self._copy(room)
            orders = [policy.arrange(view) for policy, view in zip(policies, self._views(copy), strict=True)]
            contexts = [context.reordered(order) for context, order in zip(self.contexts, orders, strict=True)]
            if contexts != self.contexts:
                batch = PromptedBatch(contexts, self.prompts, self._questions)
                batch._fill(copy)
            rows = [policy.rows(view) for policy, view in zip(policies, batch._views(copy), strict=True)]
        with watch.step("recompute"):
            chosen = [some.to(copy.keys.device) for some in rows]
            copy.repair([context.ids for context in contexts], chosen, self.prompts)
        return PatchedBatch(contexts, self.prompts, orders, [some.cpu() for some in rows], copy)

    def _copy(self, room: int) -> RowCache:
        """Copies of the contexts to overwrite, with room for prompts and more rows."""
        prompt = max(map(len, [*self.prompts, *self._questions]))
        copy = self.contexts[0].lm.row_cache(len(self.contexts), max(map(len, self.contexts)) + prompt + room)
        self._fill(copy)
        return copy

    def _fill(self, copy: RowCache) -> None:
        copy.fill((context.keys, context.values) for context in self.contexts)

    def _views(self, copy: RowCache) -> list["_Prompted"]:
        deviation: dict[str, list[Tensor]] = {}
        return [_Prompted(self, copy, deviation, i) for i in range(len(self.prompts))]

    def _received(
        self, copy: RowCache, layers: tuple[int, ...], norm: Norm, geometry: Geometry
    ) -> Float[Tensor, "batch capacity"]:
        """Scores, computed once for all choices, by a copy of the batch whose rows in use stay as they are."""
        how = layers, norm, geometry
        if how not in self._scores:
            moved = [places(geometry, context.spans) for context in self.contexts]
            if geometry != "global":
                copy.fill((c.keys_at(at), c.values) for c, (at, _) in zip(self.contexts, moved, strict=True))
            self._scores[how] = copy.received(self._questions, [start for _, start in moved], layers, norm)
            if geometry != "global":
                self._fill(copy)
        return self._scores[how]


class PatchedBatch(NamedTuple):
    """A batch of contexts with recomputed rows, and a prompt after each.

    Attributes:
        contexts: Contexts before, with their chunks reordered where a policy asked for that.
        prompts: Token ids of one prompt for each context.
        orders: Chunk at each place, for each context.
        rows: Numbers of the recomputed rows of each context, ascending.
        cache: Keys and values.
    """

    contexts: list[ComposedChunks]
    prompts: list[Int[Tensor, "_"]]
    orders: list[tuple[int, ...]]
    rows: list[Int[Tensor, "_"]]
    cache: RowCache

    @torch.no_grad()
    def logits(self, last: int = 0) -> list[Float[Tensor, "_ vocabulary"]]:
        """Next-token logits after each of the last tokens of the prompts, or after all of them if `last` is 0."""
        self.cache.rewind()
        ids = pad_sequence(self.prompts, batch_first=True)
        logits = self.cache.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=last).logits
        return [row[-(last or len(ids)) :] for row, ids in zip(logits, self.prompts, strict=True)]

    def generate(self, **options: Any) -> list[str]:
        """`LanguageModel.generate` after each prompt."""
        ids = [torch.cat([context.ids, prompt]) for context, prompt in zip(self.contexts, self.prompts, strict=True)]
        return self.contexts[0].lm.generate(ids, self.cache, **options)

    def close(self) -> None:
        """Let other patches use the memory."""
        self.contexts[0].lm.give_back(self.cache)


def kv_deviation(
    contexts: Sequence[ComposedChunks], copy: RowCache, rank: Literal["v", "k"]
) -> list[Float[Tensor, "_"]]:
    """`Context.kv_deviation` of each context, by a copy of them whose layers 0 and 1 are overwritten.

    Raises:
        ValueError: If the model has only one layer.
    """
    if len(copy.keys) < 2:
        raise ValueError("CacheBlend ranks rows by layer 1, but the model has only layer 0: use InfoFlowKV")
    ids = pad_sequence([context.ids for context in contexts], batch_first=True)
    # rows after the end of a shorter context are not in use yet
    copy.overwrite(ids, torch.arange(ids.shape[1], device=ids.device)[None], last=1)
    name = "values" if rank == "v" else "keys"
    pairs = zip(getattr(copy, name)[1], (getattr(context, name)[1, 0] for context in contexts), strict=True)
    return [(fresh[:, : stale.shape[1]] - stale).float().square().mean((0, 2)) for fresh, stale in pairs]


class _Prompted(NamedTuple):
    """One context of a batch, as a policy sees it: a `foveate.methods.recompute_policy.ComposedCache`.

    Attributes:
        prompted: The batch.
        copy: A copy of the batch, which is patched next.
        deviation: Results of `kv_deviation` by its argument, computed once for all contexts.
        context: Index of the context.
    """

    prompted: PromptedBatch
    copy: RowCache
    deviation: dict[str, list[Tensor]]
    context: int

    @property
    def spans(self) -> Spans:
        return self.prompted.contexts[self.context].spans

    @property
    def layers(self) -> int:
        return len(self.copy.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        return self.prompted._received(self.copy, layers, norm, geometry)[self.context, : self.spans[-1][1]]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        if rank not in self.deviation:
            self.deviation[rank] = kv_deviation(self.prompted.contexts, self.copy, rank)
        return self.deviation[rank][self.context]
