# pyright: basic, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
"""JoyImage Edit: [picture, references, text]; all images have one size."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from foveate.diffusers.card import Card, Layout, Stack, image, text
from foveate.methods.base import DenseFallback

__all__ = ["JoyImageEditCard"]


class JoyImageEditCard(Card):
    """`JoyImageEditTransformer3DModel`. The model rotates queries and keys itself."""

    unmerged = "makes its rotary embedding on the CPU"

    def layout(self, holder: nn.Module, inputs: dict[str, Any]) -> Layout:
        """[picture, references, text]; each image is an item of the latents."""
        *items, _, frames, height, width = inputs["hidden_states"].shape
        patch: Any = holder.config.patch_size
        if frames != 1 or patch[0] != 1:
            raise DenseFallback("latents with several frames are no images")
        pictures = (items[1] if len(items) == 2 else 1) * (image(height // patch[1], width // patch[2]),)
        return Layout((*pictures, text(inputs["encoder_hidden_states"].shape[1])))

    def stacks(self, model: nn.Module) -> Iterator[Stack]:
        """All blocks."""
        blocks: Any = model.double_blocks
        yield Stack("double_blocks", blocks, model, None, 0)
