# pyright: basic, reportPrivateImportUsage=false
"""Key/value caches of contexts that are composed of chunks, and copies of them that are repaired for a prompt."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.rotary import copy_rows
from foveate.transformers.chunk import ChunkCache
from foveate.transformers.model import LanguageModel
from foveate.transformers.row_cache import RowCache
from foveate.utils.device import Stopwatch

__all__ = ["CacheBatch", "PatchedBatch", "PromptedBatch", "kv_deviation"]


class CacheBatch:
    """Caches of a batch of contexts, each composed of chunks whose keys are rotated to their new positions.

    Chunk j has the same length in all contexts of the batch. Nothing changes a batch after it has been composed, so
    that any number of threads may use it.

    Args:
        lm: Language model that the chunks are from.
        chunks: Chunks of each context, in order.

    Attributes:
        ids: Token ids of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        keys: Keys.
        values: Values.
    """

    keys: Float[Tensor, "layers batch groups rows dim"]
    values: Float[Tensor, "layers batch groups rows dim"]

    def __init__(self, lm: LanguageModel, chunks: Sequence[Sequence[ChunkCache]]) -> None:
        self.lm, self.chunks = lm, [tuple(context) for context in chunks]
        lengths, *others = ([len(chunk.ids) for chunk in context] for context in self.chunks)
        if any(other != lengths for other in others):
            raise ValueError(
                "contexts of a batch need chunks of the same lengths in the same order: compose each alone"
            )
        self.ids = torch.stack([torch.cat([lm.prefix, *(chunk.ids for chunk in context)]) for context in self.chunks])
        self.spans: Spans = tuple(pairwise(accumulate(lengths, initial=len(lm.prefix))))
        self.keys = self.keys_at(torch.arange(self.ids.shape[1]))
        self.values = self._concatenated("values", None)

    def copy(self, room: int) -> RowCache:
        """A copy to overwrite, with room for more rows, until `LanguageModel.give_back`."""
        return self.lm.row_cache(self.keys, self.values, room)

    @torch.no_grad()
    def keys_at(self, positions: Int[Tensor, "rows"]) -> Float[Tensor, "layers batch groups rows dim"]:
        """Keys rotated to these positions in float32 or wider."""
        wide = torch.promote_types(self.lm.dtype, torch.float32)
        empty = torch.empty(0, dtype=wide, device=self.ids.device)
        cos, sin = self.lm.model.model.rotary_emb(empty, positions[None].to(self.ids.device))
        return self._concatenated("keys", (cos[0], sin[0]))

    def _concatenated(
        self, name: str, rotation: tuple[Tensor, Tensor] | None
    ) -> Float[Tensor, "layers batch groups rows dim"]:
        """Keys or values of the chunks side by side after one prefix."""
        first = getattr(self.chunks[0][0], name)
        layers, groups, _, dim = first.shape
        whole = first.new_empty(layers, len(self.chunks), groups, self.ids.shape[1], dim)
        for i, context in enumerate(self.chunks):
            start = 0
            for chunk in context:
                states = getattr(chunk, name)[:, :, len(self.lm.prefix) if start else 0 :]
                stop = start + states.shape[2]
                tables = [table[start:stop] for table in rotation or ()]
                copy_rows(whole[:, i, :, start:stop], states, *tables)
                start = stop
        return whole

    def reordered(self, orders: Sequence[Sequence[int]]) -> "CacheBatch":
        """The same contexts with their chunks in these orders."""
        chunks = [[context[i] for i in order] for context, order in zip(self.chunks, orders, strict=True)]
        return CacheBatch(self.lm, chunks)


class PromptedBatch:
    """A batch of composed caches with a prompt after each.

    Args:
        batch: Caches.
        prompts: Token ids of one prompt for each context.
        questions: Token ids to choose rows by, instead of the prompts.
    """

    def __init__(
        self, batch: CacheBatch, prompts: Int[Tensor, "batch prompt"], questions: Tensor | None = None
    ) -> None:
        self.batch, self.prompts = batch, prompts
        self._questions = prompts if questions is None else questions
        self._scores: dict[Any, Tensor] = {}

    def score(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "batch rows"]:
        """`Context.score` of each context, for one prompt each."""
        copy = self.batch.copy(self.prompts.shape[1])
        scores = self._received(copy, layers, norm, geometry)
        self.batch.lm.give_back(copy)
        return scores

    def patch(
        self, policies: Sequence[RecomputePolicy], watch: Stopwatch | None = None, room: int = 0
    ) -> "PatchedBatch":
        """The contexts with the rows recomputed that each policy chooses. All must choose the same number of rows.

        Args:
            policies: One policy for each context.
            watch: Stopwatch for the steps "score" (choice and reordering) and "recompute" (rows and prompts).
            room: Number of rows to make room for after the prompts.
        """
        batch, watch = self.batch, watch or Stopwatch(self.batch.lm.device)
        with watch.step("score"):
            copy = batch.copy(self.prompts.shape[1] + room)
            views = self._views(copy)
            orders = [policy.arrange(view) for policy, view in zip(policies, views, strict=True)]
            if any(order != tuple(range(len(order))) for order in orders):
                batch = batch.reordered(orders)
                copy.fill(batch.keys, batch.values)
                views = PromptedBatch(batch, self.prompts, self._questions)._views(copy)
            rows = [policy.rows(view) for policy, view in zip(policies, views, strict=True)]
            chosen = torch.stack(rows).to(batch.ids.device)
        with watch.step("recompute"):
            copy.repair(batch.ids, chosen, self.prompts)
        return PatchedBatch(batch, self.prompts, orders, chosen.cpu(), copy)

    def _views(self, copy: RowCache) -> list["_Prompted"]:
        deviation: dict[str, Tensor] = {}
        return [_Prompted(self, copy, deviation, i) for i in range(len(self.prompts))]

    def _received(
        self, copy: RowCache, layers: tuple[int, ...], norm: Norm, geometry: Geometry
    ) -> Float[Tensor, "batch rows"]:
        """Scores, computed once for all choices, by a copy of the batch whose rows in use stay as they are."""
        how = layers, norm, geometry
        if how not in self._scores:
            positions, start = places(geometry, self.batch.spans)
            if geometry != "global":
                copy.fill(self.batch.keys_at(positions), self.batch.values)
            self._scores[how] = copy.received(self._questions, start, layers, norm)
            if geometry != "global":
                copy.fill(self.batch.keys, self.batch.values)
        return self._scores[how]


class PatchedBatch(NamedTuple):
    """A batch of contexts with recomputed rows, and a prompt after each.

    Attributes:
        batch: Caches before, with their chunks reordered where a policy asked for that.
        prompts: Token ids of one prompt for each context.
        orders: Chunk at each place, for each context.
        rows: Rows that were recomputed, ascending.
        cache: Keys and values.
    """

    batch: CacheBatch
    prompts: Int[Tensor, "batch prompt"]
    orders: list[tuple[int, ...]]
    rows: Int[Tensor, "batch chosen"]
    cache: RowCache

    @torch.no_grad()
    def logits(self, last: int = 0) -> Float[Tensor, "batch last vocabulary"]:
        """Next-token logits after each of the last tokens of the prompts, or after all of them if `last` is 0."""
        self.cache.length = self.batch.ids.shape[1]
        return self.cache.model(input_ids=self.prompts, past_key_values=self.cache, logits_to_keep=last).logits

    def close(self) -> None:
        """Let other patches use the memory."""
        self.batch.lm.give_back(self.cache)


def kv_deviation(batch: CacheBatch, copy: RowCache, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
    """`Context.kv_deviation` of each context, by a copy of the batch whose layers 0 and 1 are overwritten.

    Raises:
        ValueError: If the model has only one layer.
    """
    if len(batch.keys) < 2:
        raise ValueError("CacheBlend ranks rows by layer 1, but the model has only layer 0: use InfoFlowKV")
    rows = batch.ids.shape[1]
    copy.overwrite(batch.ids, torch.arange(rows, device=batch.ids.device)[None], last=1)
    fresh, stale = (copy.values, batch.values) if rank == "v" else (copy.keys, batch.keys)
    return (fresh[1, :, :, :rows] - stale[1]).float().square().mean((1, 3))


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
    deviation: dict[str, Tensor]
    context: int

    @property
    def spans(self) -> Spans:
        return self.prompted.batch.spans

    @property
    def layers(self) -> int:
        return len(self.copy.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        return self.prompted._received(self.copy, layers, norm, geometry)[self.context]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        if rank not in self.deviation:
            self.deviation[rank] = kv_deviation(self.prompted.batch, self.copy, rank)
        return self.deviation[rank][self.context]
