# pyright: basic, reportPrivateImportUsage=false
"""Key/value caches of contexts that are composed of chunks: scored, recomputed in part, and restored."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.attention_received import attention_received
from foveate.ops.rotary import rotate
from foveate.transformers.attention import (
    OverwriteLayer,
    ReadOnlyLayer,
    StopForward,
    attend_by_rows,
    capture_unrotated,
    fill,
    row_index,
)
from foveate.transformers.chunk import ChunkCache

__all__ = ["CacheBatch", "Choice", "PromptedBatch"]

RECOMPUTE_ROWS = 8192
"""Rows of a forward pass: enough for full speed, few enough to bound memory."""
ROTATE_ROWS = 2048


class CacheBatch:
    """Caches of a batch of contexts, each composed of chunks whose keys are rotated to their new positions.

    Chunk j has the same length in all contexts of the batch.

    Args:
        model: Causal language model of `transformers`.
        prefix: Token ids before each context.
        chunks: Chunks of each context, in order.

    Attributes:
        ids: Token ids of all rows, prefix first.
        spans: First row of each chunk, and the row after its last.
        keys: Keys of each layer, [batch, groups, rows, dim].
        values: Values of each layer, [batch, groups, rows, dim].
    """

    def __init__(self, model: Any, prefix: Int[Tensor, "prefix"], chunks: Sequence[Sequence[ChunkCache]]) -> None:
        self.model, self.prefix, self.chunks = model, prefix, [tuple(context) for context in chunks]
        lengths, *others = ([len(chunk.ids) for chunk in context] for context in self.chunks)
        if any(other != lengths for other in others):
            raise ValueError(
                "contexts of a batch need chunks of the same lengths in the same order: compose each alone"
            )
        self.ids = torch.stack([torch.cat([prefix, *(chunk.ids for chunk in context)]) for context in self.chunks])
        self.spans: Spans = tuple(pairwise(accumulate(lengths, initial=len(prefix))))
        self.keys = self.keys_at(torch.arange(self.ids.shape[1]))
        self.values = self._concatenated("values", None)
        self._overwritten: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, index, values before

    @property
    def changed(self) -> bool:
        """Whether rows have been overwritten since the last `restore`."""
        return bool(self._overwritten)

    def dynamic_cache(self) -> DynamicCache:
        """All rows as a `DynamicCache`. It grows by copies, so that a forward pass leaves the rows unchanged."""
        return fill(DynamicCache(config=self.model.config), self.keys, self.values)

    @torch.no_grad()
    def keys_at(self, positions: Int[Tensor, "rows"]) -> list[Float[Tensor, "batch groups rows dim"]]:
        """Keys of each layer, rotated to these positions in float32 or wider."""
        wide = torch.promote_types(self.model.dtype, torch.float32)
        empty = torch.empty(0, dtype=wide, device=self.ids.device)
        cos, sin = self.model.model.rotary_emb(empty, positions[None].to(self.ids.device))
        return self._concatenated("keys", (cos[0], sin[0]))

    def _concatenated(
        self, name: str, rotation: tuple[Tensor, Tensor] | None
    ) -> list[Float[Tensor, "batch groups rows dim"]]:
        """Keys or values of the chunks side by side after one prefix, for each layer."""
        first = getattr(self.chunks[0][0], name)
        layers, groups, _, dim = first.shape
        whole = first.new_empty(layers, len(self.chunks), groups, self.ids.shape[1], dim)
        for i, context in enumerate(self.chunks):
            start = 0
            for chunk in context:
                states = getattr(chunk, name)[:, :, len(self.prefix) if start else 0 :]
                for part in states.split(ROTATE_ROWS, dim=2):
                    stop = start + part.shape[2]
                    if rotation is not None:
                        part = rotate(part, *(table[start:stop] for table in rotation))
                    whole[:, i, :, start:stop] = part
                    start = stop
        return list(whole)

    @torch.no_grad()
    def score(
        self, prompts: Int[Tensor, "batch prompt"], layers: Sequence[int], norm: Norm, geometry: Geometry
    ) -> Float[Tensor, "batch rows"]:
        """`Context.score` of each context, for one prompt each."""
        model = self.model.model
        positions, start = places(geometry, self.spans)
        prompt_positions = torch.arange(start, start + prompts.shape[1], device=prompts.device)[None]
        keys = self.keys if geometry == "global" else self.keys_at(positions)
        reading = [ReadOnlyLayer(last=layer == max(layers)) for layer in range(len(keys))]
        cache = fill(Cache(layers=[*reading]), keys, self.values)
        with attend_by_rows(self.model), capture_unrotated(self.model, "q", layers) as queries, suppress(StopForward):
            model(input_ids=prompts, position_ids=prompt_positions, past_key_values=cache)
        cos, sin = (table[0] for table in model.rotary_emb(queries[layers[0]], prompt_positions))

        def received(layer: int, context: int) -> Float[Tensor, "rows"]:
            return attention_received(
                rotate(queries[layer][context], cos, sin),
                torch.cat([keys[layer][context], reading[layer].new[context]], dim=1),
                model.layers[layer].self_attn.scaling,
                norm,
            )

        contexts = range(len(prompts))
        return torch.stack([torch.stack([received(layer, i) for layer in layers]).mean(0) for i in contexts])

    @torch.no_grad()
    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
        """`Context.kv_deviation` of each context."""
        if len(self.keys) < 2:
            raise ValueError("CacheBlend ranks rows by layer 1, but the model has only layer 0: use InfoFlowKV")
        layer = {"v": self.values, "k": self.keys}[rank][1]
        stale = layer.clone()
        self.recompute(torch.arange(self.ids.shape[1]).expand(len(self.ids), -1), layers=2)
        return (layer - stale).float().square().mean((1, 3))

    @torch.no_grad()
    def recompute(self, rows: Int[Tensor, "batch chosen"], layers: int | None = None) -> None:
        """Run these rows through the model, each over all rows before it, and overwrite them until `restore`.

        Args:
            rows: Row numbers, ascending.
            layers: Number of layers to recompute. None recomputes all.
        """
        if not rows.shape[1]:
            return
        rows, layers = rows.to(self.ids.device), layers or len(self.keys)
        for states in self.keys[:layers] + self.values[:layers]:
            index = row_index(rows, states)
            self._overwritten.append((states, index, states.gather(2, index)))
        for part in rows.split(RECOMPUTE_ROWS, dim=1):
            overwriting = [OverwriteLayer(part, last=layer == layers - 1) for layer in range(len(self.keys))]
            cache = fill(Cache(layers=[*overwriting]), self.keys, self.values)
            with attend_by_rows(self.model), suppress(StopForward):
                self.model.model(
                    input_ids=self.ids.gather(1, part), position_ids=part, past_key_values=cache, rows=part
                )

    def restore(self) -> None:
        """Undo every `recompute` and `kv_deviation`, bit for bit."""
        while self._overwritten:
            states, index, before = self._overwritten.pop()
            states.scatter_(2, index, before)

    @torch.no_grad()
    def logits(self, prompts: Int[Tensor, "batch prompt"], last: int = 0) -> Float[Tensor, "batch last vocabulary"]:
        """Next-token logits after each of the last tokens of the prompts, or after all of them if `last` is 0."""
        with attend_by_rows(self.model):
            cache = self.dynamic_cache()
            return self.model(input_ids=prompts, past_key_values=cache, logits_to_keep=last).logits

    def reordered(self, orders: Sequence[Sequence[int]]) -> "CacheBatch":
        """The same contexts with their chunks in these orders."""
        chunks = [[context[i] for i in order] for context, order in zip(self.chunks, orders, strict=True)]
        return CacheBatch(self.model, self.prefix, chunks)


class Choice(NamedTuple):
    """The rows that recompute policies have chosen.

    Attributes:
        batch: Caches, with their chunks reordered where a policy asked for that.
        orders: Chunk at each place, for each context.
        rows: Rows to recompute, ascending.
    """

    batch: CacheBatch
    orders: list[tuple[int, ...]]
    rows: Int[Tensor, "batch chosen"]


class PromptedBatch:
    """A batch of composed caches with a prompt after each, of which policies choose the rows to recompute.

    Args:
        batch: Caches without recomputed rows.
        prompts: Token ids of one prompt for each context.
    """

    def __init__(self, batch: CacheBatch, prompts: Int[Tensor, "batch prompt"]) -> None:
        self.batch, self.prompts = batch, prompts
        self._scores: dict[Any, Tensor] = {}

    def choose(self, policies: Sequence[RecomputePolicy]) -> Choice:
        """What each policy chooses for its context. All of them must choose the same number of rows."""
        views = self._views()
        orders = [policy.arrange(view) for policy, view in zip(policies, views, strict=True)]
        batch = self.batch
        if any(order != tuple(range(len(order))) for order in orders):
            batch = batch.reordered(orders)
            views = PromptedBatch(batch, self.prompts)._views()
        rows = [policy.rows(view).cpu() for policy, view in zip(policies, views, strict=True)]
        return Choice(batch, orders, torch.stack(rows))

    def _views(self) -> list["_Prompted"]:
        deviation: dict[str, Tensor] = {}  # not kept: to compute it overwrites rows, which the next choice needs again
        return [_Prompted(self.batch, self.prompts, self._scores, deviation, i) for i in range(len(self.prompts))]


class _Prompted(NamedTuple):
    """One context of a batch, as a policy sees it: a `foveate.methods.recompute_policy.ComposedCache`.

    Attributes:
        batch: Caches.
        prompts: Token ids of one prompt for each context.
        scores: Results of `CacheBatch.score` by its arguments, computed once for all contexts and choices.
        deviation: Results of `CacheBatch.kv_deviation` by its argument, computed once for all contexts of a choice.
        context: Index of the context.
    """

    batch: CacheBatch
    prompts: Int[Tensor, "batch prompt"]
    scores: dict[Any, Tensor]
    deviation: dict[str, Tensor]
    context: int

    @property
    def spans(self) -> Spans:
        return self.batch.spans

    @property
    def layers(self) -> int:
        return len(self.batch.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        how = layers, norm, geometry
        if how not in self.scores:
            self.scores[how] = self.batch.score(self.prompts, *how)
        return self.scores[how][self.context]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        if rank not in self.deviation:
            self.deviation[rank] = self.batch.kv_deviation(rank)
        return self.deviation[rank][self.context]
