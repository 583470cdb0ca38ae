# pyright: basic, reportPrivateImportUsage=false
"""A context composed of cached chunks: scored, patched, generated from, and put back."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from foveate.methods.recompute_policy import Geometry, Norm, RecomputePolicy, Spans, places
from foveate.ops.attention_received import attention_received
from foveate.ops.rotary import rotate
from foveate.transformers.chunk import ChunkCache
from foveate.transformers.layers import Enough, Reading, Rows, borrowed, by_rows, dynamic, unrotated
from foveate.transformers.patched import Patched
from foveate.utils.choices import check_choice
from foveate.utils.device import Stopwatch

if TYPE_CHECKING:
    from foveate.transformers.encoder import ChunkEncoder

__all__ = ["Asked", "Context"]

ROWS = 8192
"""Rows that are computed at once: enough for products of full speed, few enough to bound what they take."""


class Context:
    """Chunks side by side, their keys turned to where they stand now; made by `ChunkEncoder.compose`.

    Attributes:
        chunks: In order.
        ids: Tokens of all rows, prefix first.
        spans: First row of each chunk and the row behind its last.
        keys: For each layer [1, groups, rows, dim].
        values: For each layer [1, groups, rows, dim].
    """

    def __init__(self, encoder: "ChunkEncoder", chunks: tuple[ChunkCache, ...]) -> None:
        self.encoder, self.chunks = encoder, chunks
        self.ids = torch.cat([encoder.prefix, *(chunk.ids for chunk in chunks)])
        borders = accumulate((len(chunk.ids) for chunk in chunks), initial=len(encoder.prefix))
        self.spans = tuple(pairwise(borders))
        self.keys = encoder.keys_at(chunks, torch.arange(len(self), device=encoder.device))
        self.values = encoder.values_of(chunks)
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, rows, what they were
        self._ticket: object = None  # of the patch that its rows are of

    def __len__(self) -> int:
        return len(self.ids)

    def cache(self) -> DynamicCache:
        """All rows as the library's own cache, for a forward or `model.generate`, which leave the rows as they are."""
        return dynamic(self.encoder.model, self.keys, self.values)

    @torch.no_grad()
    def score(
        self, prompt: str | Sequence[int], layers: Sequence[int], norm: Norm = "l2", geometry: Geometry = "global"
    ) -> Float[Tensor, "rows"]:
        """The attention that each row receives from a prompt behind the context, mean over these layers.

        Args:
            prompt: Text, or token ids.
            layers: Layer numbers.
            norm: Over the tokens of the prompt.
            geometry: Where the chunks stand meanwhile; see `InfoFlowKV`.

        Raises:
            ValueError: If the prompt is empty, or too long for the model's context, the model has not these layers, or
                norm or geometry are unknown.
        """
        ids, encoder = self._prompt(prompt), self.encoder
        if not layers or not all(0 <= layer < len(self.keys) for layer in layers):
            raise ValueError(f"layers must be some of 0 to {len(self.keys) - 1}, not {list(layers)}")
        check_choice("norm", norm, Norm)
        check_choice("geometry", geometry, Geometry)
        positions, start = places(geometry, self.spans)
        at = torch.arange(start, start + len(ids), device=encoder.device)
        keys = self.keys if geometry == "global" else encoder.keys_at(self.chunks, positions.to(encoder.device))
        reading = [Reading(layer == max(layers)) for layer in range(len(keys))]
        cache = borrowed(Cache(layers=[*reading]), keys, self.values)
        with by_rows(encoder.model), unrotated(encoder.model, "q", layers) as queries, suppress(Enough):
            encoder.model.model(input_ids=ids[None], position_ids=at[None], past_key_values=cache)
        cos, sin = (table[0] for table in encoder.model.model.rotary_emb(queries[layers[0]], at[None]))
        scores = [
            attention_received(
                rotate(queries[layer], cos, sin),
                torch.cat([keys[layer][0], reading[layer].new[0]], dim=1),
                encoder.model.model.layers[layer].self_attn.scaling,
                norm,
            )
            for layer in layers
        ]
        return torch.stack(scores).mean(0)

    @torch.no_grad()
    def kv_deviation(self, rank: Literal["v", "k"] = "v") -> Float[Tensor, "rows"]:
        """How much each row's values or keys of layer 1 change when layers 0 and 1 are computed anew: mean square.

        All rows of these two layers are overwritten, until `restore`.

        Raises:
            ValueError: If the model has one layer only.
        """
        if len(self.keys) < 2:
            raise ValueError("CacheBlend ranks by layer 1, and the model has layer 0 alone: use InfoFlowKV")
        layer = {"v": self.values, "k": self.keys}[rank][1]
        stale = layer.clone()
        self._compute(torch.arange(len(self)), layers=2)
        return (layer - stale).float().square().mean((0, 1, 3))

    def recompute(self, rows: Int[Tensor, "chosen"]) -> None:
        """Run these rows through all layers, each over all that stands before it, and overwrite them until `restore`.

        Args:
            rows: Row numbers, in any order.

        Raises:
            ValueError: If the context has no such row.
        """
        rows = rows.cpu()
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise ValueError(
                f"rows are numbered from 0 to {len(self) - 1}, not {int(rows.min())} to {int(rows.max())}"
            )
        self._compute(rows, layers=len(self.keys))

    @torch.no_grad()
    def _compute(self, rows: Int[Tensor, "chosen"], layers: int) -> None:
        if not len(rows):
            return
        rows = rows.unique().to(self.encoder.device)
        self._before += [(part, rows, part[:, :, rows]) for part in self.keys[:layers] + self.values[:layers]]
        for part in rows.split(ROWS):
            overwriting = [Rows(part, layer == layers - 1) for layer in range(len(self.keys))]
            cache = borrowed(Cache(layers=[*overwriting]), self.keys, self.values)
            with by_rows(self.encoder.model), suppress(Enough):
                self.encoder.model.model(
                    input_ids=self.ids[None, part], position_ids=part[None], past_key_values=cache, rows=part
                )

    def restore(self) -> None:
        """Put all rows back, bit for bit."""
        while self._before:
            tensor, rows, before = self._before.pop()
            tensor[:, :, rows] = before
        self._ticket = None

    def patch(
        self, method: RecomputePolicy, prompt: str | Sequence[int], question: str | Sequence[int] | None = None
    ) -> "Patched":
        """Compute again what the method chooses for this prompt.

        Args:
            method: `InfoFlowKV`, or one of `foveate.methods.baselines.kv_baselines`.
            prompt: Text or token ids; what is generated from later.
            question: What to choose by, in place of the prompt. The authors' release chooses by the bare question
                and generates from a prompt with instructions around it.

        Raises:
            ValueError: If the context is patched already, or the prompt is empty or too long.
        """
        if self._ticket or self._before:
            raise ValueError("the context is patched already: call undo() on what patch returned, or restore() here")
        ids, context, watch = self._prompt(prompt), self, Stopwatch(self.encoder.device)
        asked = ids.tolist() if question is None else self._prompt(question).tolist()
        try:
            with watch.step("score"):
                order = method.arrange(Asked(self, asked))
                if order != tuple(range(len(self.chunks))):
                    context = Context(self.encoder, tuple(self.chunks[chunk] for chunk in order))
                rows = method.rows(Asked(context, asked)).cpu()  # before the long work: nothing waits for it
            with watch.step("recompute"):
                context.recompute(rows)
        except BaseException:
            context.restore()
            raise
        return Patched(context, ids, order, rows, watch)

    def answers(self, method: RecomputePolicy, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[str]:
        """What the model generates for each prompt, one after another; the options are those of `Patched.generate`."""
        if isinstance(prompts, str):
            raise ValueError(f"give a list of prompts, not one text: [{prompts[:20]!r}]")
        texts: list[str] = []
        for prompt in prompts:
            with self.patch(method, prompt) as patched:
                texts.append(patched.generate(**options))
        return texts

    def _prompt(self, prompt: str | Sequence[int]) -> Int[Tensor, "prompt"]:
        ids = self.encoder.tokens(prompt)
        if not len(ids):
            raise ValueError("the prompt is empty: ask something")
        self.encoder.check_length(len(self) + len(ids), "context and prompt", "compose fewer chunks")
        return ids


class Asked(NamedTuple):
    """What a method sees of a context and a prompt; see `foveate.methods.recompute_policy.ComposedCache`."""

    context: Context
    prompt: list[int]

    @property
    def spans(self) -> Spans:
        """See `ComposedCache`."""
        return self.context.spans

    @property
    def layers(self) -> int:
        """See `ComposedCache`."""
        return len(self.context.keys)

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Tensor:
        """See `ComposedCache`."""
        return self.context.score(self.prompt, layers, norm, geometry)

    def kv_deviation(self, rank: Literal["v", "k"]) -> Tensor:
        """See `ComposedCache`."""
        return self.context.kv_deviation(rank)
