# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""From what the methods decided for a stack of blocks to the `LayerPlan` of each attention layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.diffusers.backend import LayerPlan
from foveate.diffusers.card import Card, Layout
from foveate.diffusers.layers import Layer
from foveate.methods.base import AttentionPlan
from foveate.ops.block_table import BlockTable, block_starts, block_table
from foveate.ops.curves import inverse_order
from foveate.ops.joint_attention import LogLinear, Pattern
from foveate.ops.merging import Regions, merged_pattern
from foveate.utils.cache import WeakTensorCache, cached_by_tensor, persistent

__all__ = ["StackPlan", "alike", "layer_plan", "sequence_order"]


class StackPlan(NamedTuple):
    """What the methods decided for the layers of one stack in a forward pass.

    Attributes:
        layouts: The attention sequence of each sample; one if all are alike, none if the card could not tell.
        attention: Plan of sparse attention for each number of text tokens, 0 for layers of the image alone; None if
            dense.
        regions: Regions within which tokens merge, those of one process if several share the tokens; None if they
            do not merge.
        why: Why the stack is dense.
        context: Config of the context parallelism that divides the tokens over processes; None without it.
        batch: Number of samples.
        device: Device of the tokens.
        dtype: Their dtype.
        replaced: Why layers are dense whose processor was replaced by one that knows no backends, by name.
    """

    layouts: tuple[Layout, ...] = ()
    attention: dict[int, AttentionPlan] | None = None
    regions: Regions | None = None
    why: str = "no forward yet"
    context: Any = None
    batch: int = 0
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    replaced: Mapping[str, str] = {}

    @property
    def layout(self) -> Layout:
        """The attention sequence of the first sample. Others have the same images and number of tokens."""
        return self.layouts[0]

    @property
    def ranks(self) -> int:
        """Number of processes that share the tokens."""
        return 1 if self.context is None else self.context.ulysses_degree or 1

    @property
    def kept(self) -> int:
        """Number of image tokens after merging, of all processes."""
        return self.regions.kept * self.layout.only_images().tokens // len(self.regions.order)

    @property
    def period(self) -> int:
        """Number of layers after which the patterns repeat."""
        return len(next(iter(self.attention.values())).tables) if self.attention else 1

    def is_sparse(self, layer: Layer) -> bool:
        """Whether sparse attention works in a layer."""
        return layer.sparse and self.attention is not None

    def is_merged(self, layer: Layer) -> bool:
        """Whether a layer attends among merged tokens."""
        return layer.merges and self.regions is not None

    def layouts_of(self, layer: Layer) -> list[Layout]:
        """The sequence of each sample in one layer; one if all are alike."""
        return alike([layout if layer.joint else layout.only_images() for layout in self.layouts])

    def pattern(self, layer: Layer, text: int) -> Pattern | None:
        """Which tokens attend to which in a layer with this many text tokens; None if all to all."""
        if not self.is_sparse(layer):
            return None
        tables = self.attention[text].tables
        table = tables[layer.number % len(tables)]
        return merged_pattern(table, self.regions, text) if self.is_merged(layer) else table


def alike(layouts: Layout | list[Layout]) -> list[Layout]:
    """The layouts of all samples; one if they are alike."""
    layouts = [layouts] if isinstance(layouts, Layout) else layouts
    return layouts if len(set(layouts)) > 1 else layouts[:1]


def layer_plan(stack: StackPlan, layer: Layer, card: Card) -> LayerPlan | None:
    """The plan of one layer; None if its attention is the model's own."""
    if not stack.is_sparse(layer) and not (stack.is_merged(layer) and card.rope):
        return card.dense_plan()
    runs = [(layout, len([*same])) for layout, same in groupby(stack.layouts_of(layer))]
    parts = tuple(_plan_of_layout(stack, layer, layout, card) for layout, _ in runs)
    return parts[0] if len(parts) == 1 else replace(parts[0], parts=parts, samples=tuple(n for _, n in runs))


def _plan_of_layout(stack: StackPlan, layer: Layer, layout: Layout, card: Card) -> LayerPlan:
    """The plan of one layer for samples with this layout."""
    pattern = stack.pattern(layer, layout.text)
    if layout.references:
        pattern = with_references(pattern, layout.references)
    if stack.is_merged(layer):
        layout = layout.merged(stack.kept)
        order, inverse = merged_order(layout, stack.device, stack.ranks)
    else:
        orders = stack.attention[layout.text].orders
        order, inverse = sequence_order(orders[layer.number % len(orders)], layout, stack.ranks)
    if pattern is None and any(sample.padded for sample in stack.layouts):
        pattern = attend_to_all(len(order))  # padding is left out
    hides_padding, streams = card.padding_mask is not None, tuple(layout.streams())
    return LayerPlan(order, inverse, pattern, hides_padding, streams, layout.count("reference"))


@cached_by_tensor
def sequence_order(image_order: Tensor, layout: Layout, ranks: int = 1) -> tuple[Tensor, Tensor | None]:
    """Order and inverse of an attention sequence: references, text, then the image tokens in the order of a plan.

    The inverse has the length of the whole sequence. It is None if the sequence has this order already.

    Args:
        image_order: Raster index of the image token at each place.
        layout: The sequence.
        ranks: Number of processes whose parts of the sequence Ulysses concatenates.
    """
    return _order_of(layout, image_order.cpu(), image_order.device, ranks)


@lru_cache(maxsize=64)
@persistent
def merged_order(layout: Layout, device: torch.device, ranks: int) -> tuple[Tensor, Tensor | None]:
    """`sequence_order` of a sequence whose image tokens are merged, which leaves them in the order of the plan."""
    return _order_of(layout, slice(None), device, ranks)


def _order_of(layout: Layout, image_order: Any, device: torch.device, ranks: int) -> tuple[Tensor, Tensor | None]:
    # every process holds a part of the text and a part of the image: [text 0, image 0, text 1, image 1, ...]
    streams = [stream.tensor_split(ranks) for stream in torch.arange(layout.tokens).split(layout.streams())]
    place = inverse_order(torch.cat([part for parts in zip(*streams, strict=True) for part in parts]))
    first = layout.positions("reference"), layout.positions("text")
    order = place[torch.cat([*first, layout.positions("image")[image_order]])]
    if torch.equal(order, torch.arange(layout.tokens)):
        return order.to(device), None
    return order.to(device), inverse_order(torch.cat([order, place[layout.positions("padding")]])).to(device)


@lru_cache(maxsize=16)
def attend_to_all(tokens: int) -> BlockTable:
    """The table in which every token attends to every other."""
    starts = block_starts(tokens)
    return block_table([range(len(starts) - 1)] * (len(starts) - 1), starts)


_WITH_REFERENCES: WeakTensorCache[BlockTable] = WeakTensorCache()


def with_references(pattern: Pattern, tokens: int) -> Pattern:
    """The pattern with the keys of `tokens` reference tokens in front, which all queries read."""
    if isinstance(pattern, LogLinear):
        return pattern
    return _WITH_REFERENCES.get([*pattern], tokens, lambda: pattern.with_first_keys(tokens))
