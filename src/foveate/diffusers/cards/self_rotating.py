# pyright: basic, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
"""Models that rotate queries and keys in a way of their own: JoyImage Edit, ERNIE-Image, GLM-Image, Kandinsky 5."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foveate.diffusers.card import Card, Layout, Stack, image, text, text_and_padding, video
from foveate.methods.base import DenseFallback
from foveate.utils.cache import WeakTensorCache

__all__ = ["ErnieImageCard", "GlmImageCard", "JoyImageEditCard", "Kandinsky5Card"]

HALVES = "rotates halves of the channels instead of pairs"


class JoyImageEditCard(Card):
    """`JoyImageEditTransformer3DModel`: [picture, references, text]; all images have one size."""

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


class ErnieImageCard(Card):
    """`ErnieImageTransformer2DModel`: [image, text, padding]."""

    attention = {"self_attention": True}  # noqa: RUF012
    padding_mask = "attention_mask"
    unmerged = HALVES

    def layout(self, holder: nn.Module, inputs: dict[str, Any]) -> list[Layout]:
        """The image, then the text, padded to the longest."""
        rows, columns = (side // holder.config.patch_size for side in inputs["hidden_states"].shape[2:])
        tokens, lengths = inputs["text_bth"].shape[1], inputs["text_lens"]
        mask = _MASKS.get([lengths], tokens, lambda: torch.arange(tokens) < lengths[:, None].cpu())
        return [Layout((image(rows, columns), *words)) for words in text_and_padding(tokens, mask)]

    def stacks(self, model: nn.Module) -> Iterator[Stack]:
        """All blocks."""
        blocks: Any = model.layers
        yield Stack("layers", blocks, model, None, 0)


_MASKS: WeakTensorCache[Tensor] = WeakTensorCache()  # reading lengths waits for the device


class GlmImageCard(Card):
    """`GlmImageTransformer2DModel`: [text, image]."""

    attention = {"attn1": True}  # noqa: RUF012
    unmerged = HALVES

    def layout(self, holder: nn.Module, inputs: dict[str, Any]) -> Layout:
        """The text, then the image."""
        caches = inputs.get("kv_caches")
        if caches is not None and caches[0].mode == "read":
            raise DenseFallback("keys of the references are cached")
        rows, columns = (side // holder.config.patch_size for side in inputs["hidden_states"].shape[2:])
        return Layout((text(inputs["encoder_hidden_states"].shape[1]), image(rows, columns)))


class Kandinsky5Card(Card):
    """`Kandinsky5Transformer3DModel`, for images and videos: video tokens alone; text by cross-attention."""

    start_percent = 0.4
    attention = {"self_attention": False}  # noqa: RUF012
    unmerged = "rounds rotated queries and keys to bfloat16"

    def layout(self, holder: nn.Module, inputs: dict[str, Any]) -> Layout:
        """The video; its grid is that of the latent's patches."""
        if inputs.get("sparse_params") is not None:
            raise DenseFallback("the model's own sparse attention is on")
        sides, patch = inputs["hidden_states"].shape[1:4], holder.config.patch_size
        return Layout((video(*(side // size for side, size in zip(sides, patch, strict=True))),))

    def stacks(self, model: nn.Module) -> Iterator[Stack]:
        """The blocks of the video."""
        blocks: Any = model.visual_transformer_blocks
        yield Stack("visual_transformer_blocks", blocks, model, None, 0)
