"""Qwen-Image (Edit and Layered too): [text, images], sizes of the images in `img_shapes`."""

from typing import Any

import torch
from torch import Tensor

from foveate.diffusers.card import Card, TokenLayout, image, text_and_padding
from foveate.methods.base import DenseFallback

__all__ = ["QwenImageCard"]


class QwenImageCard(Card):
    """`QwenImageTransformer2DModel`. Its text is padded to the longest prompt of a batch."""

    rope = "image_rotary_emb"
    timestep_scale = 1.0
    merged_modules = {"attn": "attn", "img_mlp": "mlp"}  # noqa: RUF012
    padding_mask = "encoder_hidden_states_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """Text, its padding, and the images: the picture first, then its references or layers."""
        shapes = inputs["img_shapes"]
        if any(sample != shapes[0] for sample in shapes):
            raise DenseFallback("the images differ in size between the samples of the batch")
        first = shapes[0] if isinstance(shapes[0], list) else [shapes[0]]
        if any(frames != 1 for frames, _, _ in first):
            raise DenseFallback("img_shapes with several frames are no images")
        texts = text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs.get("encoder_hidden_states_mask"))
        return [TokenLayout((*words, *(image(*grid) for _, *grid in first))) for words in texts]

    def rotation(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From the complex rotations of image and text."""
        turns = torch.cat(rope[::-1])
        return turns.real.repeat_interleave(2, -1), turns.imag.repeat_interleave(2, -1)

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Text of models that modulate references in their own way."""
        return "modulates each token by its image" if getattr(model.config, "zero_cond_t", False) else ""
