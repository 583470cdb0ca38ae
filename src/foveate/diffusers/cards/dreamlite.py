"""DreamLite: a UNet, some of whose blocks have cross-attention alone."""

from typing import Any, ClassVar

from diffusers.models.transformers.transformer_2d_dreamlite import (
    BasicTransformerBlockDreamLite,
    DreamLiteTransformer2DModel,
)

from foveate.diffusers.cards.blocks import UNetCard

__all__ = ["DreamLiteCard"]


class DreamLiteCard(UNetCard):
    """`DreamLiteUNetModel`."""

    parts = DreamLiteTransformer2DModel, BasicTransformerBlockDreamLite
    wrapper: ClassVar[Any] = None
    merging_unsupported_reason = "has blocks that replace their tokens instead of adding to them"
