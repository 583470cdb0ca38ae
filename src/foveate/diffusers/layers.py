# pyright: basic
"""The self-attention layers of a model, and their processors."""

from typing import Any, NamedTuple

from torch import nn

from foveate.diffusers.backend import dispatches
from foveate.diffusers.card import Card
from foveate.diffusers.merging import MergeGroup

__all__ = ["Layer", "attentions", "own_processor", "replaced_later", "takes_merged_tokens"]


class Layer(NamedTuple):
    """One self-attention layer.

    Attributes:
        name: Its name in the model.
        attn: The attention module.
        block: The block that holds it.
        holder: See `Stack.holder`.
        number: Number of its block, counted through the whole model.
        joint: Whether text and image attend to each other in it.
        sparse: Whether sparse attention works in it.
        group: The group that its block merges with; None if the block never merges.
        merges: Whether its attention sees merged tokens when the group merges.
    """

    name: str
    attn: Any
    block: nn.Module
    holder: nn.Module
    number: int
    joint: bool
    sparse: bool
    group: MergeGroup | None
    merges: bool

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return getattr(self.attn, "head_dim", None) or self.inner_dim // self._heads

    @property
    def inner_dim(self) -> int:
        """Channels of all heads together."""
        if head_dim := getattr(self.attn, "head_dim", None):
            return self._heads * head_dim
        return getattr(self.attn, "inner_dim", None) or self.attn.to_query.out_features

    @property
    def _heads(self) -> int:
        return getattr(self.attn, "heads", None) or self.attn.num_heads


def attentions(card: Card, block: nn.Module) -> dict[str, Any]:
    """The self-attention modules of a block by name."""
    if getattr(block, "only_cross_attention", False):
        return {}
    return {name: attn for name in card.attention if (attn := getattr(block, name, None)) is not None}


def own_processor(layer: Layer, card: Card) -> Any:
    """The processor of a layer if it attends through diffusers' dispatcher, else a wrapper that does.

    Raises:
        ValueError: If it neither does nor has a wrapper.
    """
    processor = layer.attn.processor
    if card.wrapper is not None and type(processor) in card.wrapper.known:
        return card.wrapper(processor)
    if not dispatches(processor):
        raise ValueError(
            f"{layer.name} has a {type(processor).__name__}, which foveate does not know: restore the model's own "
            f"processors first, or leave it dense with dense_layers={str(layer.number)!r}"
        )
    return processor


def takes_merged_tokens(layer: Layer, card: Card) -> bool:
    """Whether the processor of a layer works on fewer tokens: an unknown one may keep maps of all tokens."""
    processor = layer.attn.processor
    return dispatches(processor) if card.wrapper is None else type(processor) in (card.wrapper, *card.wrapper.known)


def replaced_later(layer: Layer) -> str:
    """Why a layer is dense whose processor was replaced after `apply`."""
    return f"a {type(layer.attn.processor).__name__} was set after apply: remove and apply again"
