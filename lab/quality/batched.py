# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportReturnType=false
"""Many contexts patched at once: what `Context.patch` computes, for contexts whose chunks have the same lengths.

Methods choose rows one context at a time, by their own code; the model runs over all of them together. Chunks are
encoded where they will stand, each behind a prefix of its own, so that no key has to be turned.
tests/lab/quality/test_context.py compares with `Context.patch`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.transformers.layers import borrowed

__all__ = ["Batch", "Rows"]

PREFIX = 1  # tokens in front of every context

KV = list[tuple[Tensor, Tensor]]


class Overwriting(DynamicLayer):
    """Shows what is stored, with new keys and values in the rows of each context.

    Args:
        rows: Of each context; behind the stored ones if there are none.
    """

    def __init__(self, rows: Int[Tensor, "batch chosen"] | None = None) -> None:
        super().__init__()
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values; stored tensors are left as they are."""
        new = key_states, value_states
        if self.rows is None:
            self.keys, self.values = (torch.cat(x, 2) for x in zip((self.keys, self.values), new, strict=True))
        else:
            at = self.rows[:, None, :, None].expand_as(key_states)
            self.keys, self.values = self.keys.scatter(2, at, key_states), self.values.scatter(2, at, value_states)
        return self.keys, self.values


class Rows(NamedTuple):
    """What a method did to each context.

    Attributes:
        rows: That were computed again; as many in each.
        logits: Behind the last token of the prompt.
        order: Which chunk stands at each place.
    """

    rows: Int[Tensor, "batch chosen"]
    logits: Float[Tensor, "batch vocabulary"]
    order: Int[Tensor, "batch chunks"]


class Batch:
    """Contexts, each with a prompt, and their stale cache.

    Args:
        model: Of `transformers`, with eager attention.
        ids: Of prefix and chunks.
        spans: Of the chunks, in every context.
        prompts: One behind each context.
    """

    def __init__(
        self, model: Any, ids: Int[Tensor, "batch rows"], spans: Spans, prompts: Int[Tensor, "batch prompt"]
    ) -> None:
        self.model, self.ids, self.spans, self.prompts = model, ids, spans, prompts
        self._known: dict[Any, Any] = {}

    def _once(self, make: Callable[..., Any], *arguments: Any) -> Any:
        key = make.__name__, *arguments
        if key not in self._known:
            self._known[key] = make(*arguments)
        return self._known[key]

    def stale(self, geometry: Geometry = "global") -> KV:
        """Keys and values of the chunks, each computed alone."""
        return self._once(self._stale, geometry)

    def full(self) -> KV:
        """Keys and values of a full prefill."""
        return self._once(self._full)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "batch rows"]:
        """The attention that each row receives from its prompt."""
        return self._once(self._received, layers, norm, geometry)

    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
        """Mean square change of each row in layer 1."""
        return self._once(self._drift, rank)

    @torch.no_grad()
    def _stale(self, geometry: Geometry) -> KV:
        at = places(geometry, self.spans)[0].to(self.ids.device)
        # every chunk brings a prefix, which is dropped afterwards
        parts = [torch.arange(PREFIX)]
        parts += [torch.cat([torch.arange(PREFIX), torch.arange(*span)]) for span in self.spans]
        chunk = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)]).to(at.device)
        source = torch.cat(parts).to(at.device)
        position = torch.cat(
            [at[part[-1]] - len(part) + 1 + torch.arange(len(part), device=at.device) for part in parts]
        )
        mask = (chunk[:, None] == chunk) & (position[:, None] >= position)
        kept = torch.cat([torch.arange(len(part)) >= (PREFIX if i else 0) for i, part in enumerate(parts)])
        layers = self._forward(self.ids[:, source], position[None], mask[None, None])[1]
        return [(keys[:, :, kept], values[:, :, kept]) for keys, values in layers]

    @torch.no_grad()
    def _full(self) -> KV:
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        return self._forward(self.ids, at[None], (at[:, None] >= at)[None, None])[1]

    @torch.no_grad()
    def _received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "batch rows"]:
        start = places(geometry, self.spans)[1]
        weights = self._ask(self.stale(geometry), start, output_attentions=True).attentions
        context = [weights[layer][..., : self.ids.shape[1]].mean(1) for layer in layers]  # [batch, prompt, rows]
        order = {"l2": 2, "l1": 1}[norm]
        return torch.stack([torch.linalg.vector_norm(layer, order, dim=1) for layer in context]).mean(0).cpu()

    def _drift(self, rank: Literal["v", "k"]) -> Float[Tensor, "batch rows"]:
        kind = {"k": 0, "v": 1}[rank]
        return (self.full()[1][kind] - self.stale()[1][kind]).square().mean((1, 3)).cpu()

    @torch.no_grad()
    def patch(self, methods: Sequence[RecomputePolicy]) -> Rows:
        """What the methods, one for each context, choose and bring about."""
        asked = [Asked(self, i) for i in range(len(self.ids))]
        order = torch.tensor([method.arrange(one) for method, one in zip(methods, asked, strict=True)])
        batch = self
        if (order != torch.arange(len(self.spans))).any():
            batch = self.reordered(order)
            asked = [Asked(batch, i) for i in range(len(self.ids))]
        rows = torch.stack([method.rows(one) for method, one in zip(methods, asked, strict=True)])
        layers = batch.stale()
        if any(one.drifted for one in asked):
            layers = batch.full()[:2] + layers[2:]
        return Rows(rows, batch.logits(batch.recomputed(layers, rows)), order)

    def recomputed(self, layers: KV, rows: Int[Tensor, "batch chosen"]) -> KV:
        """The cache with these rows of each context computed again."""
        if not rows.shape[1]:
            return layers
        rows = rows.to(self.ids.device)
        mask = rows[..., None] >= torch.arange(self.ids.shape[1], device=rows.device)
        return self._forward(self.ids.gather(1, rows), rows, mask[:, None], layers, rows)[1]

    def logits(self, layers: KV) -> Float[Tensor, "batch vocabulary"]:
        """Behind the prompt, over this cache."""
        return self._ask(layers, self.ids.shape[1]).logits[:, -1].float()

    def reordered(self, order: Int[Tensor, "batch chunks"]) -> "Batch":
        """The contexts with their chunks in another order.

        Raises:
            ValueError: If the chunks differ in length.
        """
        if len({stop - start for start, stop in self.spans}) > 1:
            raise ValueError("only chunks of the same length can change places in a batch")
        prefix, length = self.spans[0][0], self.spans[0][1] - self.spans[0][0]
        chunks = self.ids[:, prefix:].unflatten(1, (-1, length))
        moved = chunks.gather(1, order.to(chunks.device)[..., None].expand_as(chunks)).flatten(1)
        return Batch(self.model, torch.cat([self.ids[:, :prefix], moved], 1), self.spans, self.prompts)

    def _ask(self, layers: KV, start: int, **options: Any) -> Any:
        at = torch.arange(self.prompts.shape[1], device=self.ids.device)
        stored = torch.ones(len(at), self.ids.shape[1], dtype=torch.bool, device=at.device)
        mask = torch.cat([stored, at[:, None] >= at], 1)[None, None]
        return self._forward(self.prompts, start + at[None], mask, layers, **options)[0]

    def _forward(
        self,
        ids: Tensor,
        position: Tensor,
        mask: Tensor,
        layers: KV | None = None,
        rows: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, KV]:
        """What the model says, and its cache afterwards."""
        stored = [Overwriting(rows) for _ in self.model.model.layers]
        kv = Cache(layers=[*stored])
        if layers is not None:
            borrowed(kv, *zip(*layers, strict=True))
        else:
            nothing = torch.empty(len(ids), self.model.config.num_key_value_heads, 0, self.model.config.head_dim)
            borrowed(kv, *([nothing.to(self.model.device)] * len(stored) for _ in range(2)))
        added = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
        output = self.model(
            input_ids=ids,
            position_ids=position.expand(len(ids), -1),
            attention_mask=added,
            past_key_values=kv,
            **options,
        )
        return output, [(layer.keys, layer.values) for layer in stored]


class Asked:
    """What a method sees of one context; see `foveate.methods.recompute_policy.ComposedCache`."""

    def __init__(self, batch: Batch, index: int) -> None:
        self.batch, self.index, self.drifted = batch, index, False

    @property
    def spans(self) -> Spans:
        """Of the chunks."""
        return self.batch.spans

    @property
    def layers(self) -> int:
        """How many the model has."""
        return len(self.batch.model.model.layers)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        """Attention from the prompt."""
        return self.batch.received(layers, norm, geometry)[self.index]

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        """Change in layer 1."""
        self.drifted = True
        return self.batch.kv_deviation(rank)[self.index]
