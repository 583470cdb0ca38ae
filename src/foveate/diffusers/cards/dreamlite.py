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

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Blocks without self-attention replace their tokens by their norm."""
        return "has blocks that replace their tokens instead of adding to them"
