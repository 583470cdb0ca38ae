"""Models whose processors call torch's attention themselves: AuraFlow, CogView4, HiDream, HunyuanDiT, Lumina 2."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foveate.diffusers.card import (
    Card,
    Stack,
    TokenLayout,
    cos_and_sin,
    padding,
    patches,
    refiner_and_layers,
    text,
    text_lengths,
)
from foveate.diffusers.cards.blocks import DispatchedProcessor
from foveate.methods.base import DenseFallback, TokenMerging, default_skip

__all__ = ["AuraFlowCard", "CogView4Card", "HiDreamCard", "HunyuanDiTCard", "Lumina2Card"]


class AuraFlowCard(Card):
    """`AuraFlowTransformer2DModel`: [registers and text, image], without a rotary embedding."""

    timestep_scale = 1.0
    wrapper = DispatchedProcessor

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The registers, which are learned tokens, the text and the image."""
        words = holder.register_tokens.shape[1] + inputs["encoder_hidden_states"].shape[1]
        return TokenLayout((text(words), patches(inputs["hidden_states"].shape[2:], holder.config.patch_size)))

    def stacks(self, model: Any) -> Iterator[Stack]:
        """Double-stream blocks, then blocks that are given text and image in one tensor."""
        double, single = model.joint_transformer_blocks, model.single_transformer_blocks
        yield Stack("joint_transformer_blocks", double, model, "double", default_skip(len(double), double=True))
        yield Stack("single_transformer_blocks", single, model, "single", default_skip(len(single)), joined=True)


class CogView4Card(Card):
    """`CogView4Transformer2DModel`: [text, image]."""

    attention = {"attn1": True}  # noqa: RUF012
    rope = "image_rotary_emb"
    rotates_text = False
    rotates_halves = True
    returns_image_first = True
    merged_modules = {"attn1": "attn"}  # noqa: RUF012
    wrapper = DispatchedProcessor

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The text, then the image."""
        picture = patches(inputs["hidden_states"].shape[2:], holder.config.patch_size)
        return TokenLayout((text(inputs["encoder_hidden_states"].shape[1]), picture))


class HunyuanDiTCard(Card):
    """`HunyuanDiT2DModel`: image tokens alone; the text is read by cross-attention."""

    blocks = "blocks"
    attention = {"attn1": False}  # noqa: RUF012
    wrapper = DispatchedProcessor
    merging_unsupported_reason = "rotates the image in cross-attention too, and adds early blocks to late ones"


class HiDreamCard(Card):
    """`HiDreamImageTransformer2DModel`: [image, text], in blocks that are wrapped in another module."""

    attention = {"block.attn1": True}  # noqa: RUF012
    rope = "image_rotary_emb"
    returns_image_first = True
    merged_modules = {"block.attn1": "attn", "block.ff_i": "mlp"}  # noqa: RUF012
    wrapper = DispatchedProcessor

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The image, the tokens that fill it up, which take part in attention, then the text of three encoders."""
        latent = inputs["hidden_states"]
        if latent.ndim == 3:
            raise DenseFallback("the image is packed already: pass latents with rows and columns")
        picture, llama = patches(latent.shape[2:], holder.config.patch_size), inputs["encoder_hidden_states_llama3"]
        filling = 0 if latent.shape[2] == latent.shape[3] else holder.max_seq - picture.tokens
        words = inputs["encoder_hidden_states_t5"].shape[1] + 2 * llama[0].shape[1]
        return TokenLayout((picture, text(filling + words)))

    def stacks(self, model: Any) -> Iterator[Stack]:
        """Double-stream blocks, then single-stream blocks."""
        for name in ("double_stream_blocks", "single_stream_blocks"):
            blocks = getattr(model, name)
            yield Stack(name, blocks, model, name, default_skip(len(blocks)), joined=name == "single_stream_blocks")

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From a 2 x 2 rotation for each pair of channels, [batch, tokens, 1, pairs, 2, 2], alike in all samples."""
        cos, _, sin, _ = rope[0, :, 0].flatten(-2).repeat_interleave(2, -2).unbind(-1)
        return cos, sin

    def unrotated(self, rope: Tensor) -> Tensor:
        """The rotation by zero."""
        return torch.eye(2).to(rope).expand_as(rope[:, :1])

    def residuals_between_blocks(self, inputs: dict[str, Any]) -> bool:
        """The model cuts off the text by its position after each block."""
        return True

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave images unmerged that share their tensor with tokens that fill it up."""
        rows, columns = inputs["hidden_states"].shape[2:]
        if rows != columns:
            raise DenseFallback("tokens fill up an image that is no square")

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """The timestep by its name."""
        return inputs["timesteps"]


class Lumina2Card(Card):
    """`Lumina2Transformer2DModel`: [text, image, padding]. Its first blocks see the image or the text alone."""

    rope = "image_rotary_emb"
    timestep_scale = 1.0
    padding_mask = "attention_mask"
    wrapper = DispatchedProcessor
    merged_modules = {"attn": "attn", "feed_forward": "mlp"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """Text and image, padded to the longest sample; blocks that refine the image see no text."""
        picture = patches(inputs["hidden_states"].shape[2:], self.patch)
        if isinstance(holder, nn.ModuleList):
            return [TokenLayout((picture,))]
        lengths = text_lengths(inputs["encoder_attention_mask"])
        return [TokenLayout((text(n), picture, padding(max(lengths) - n))) for n in lengths]

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks that refine the image, then the main blocks; those that refine the text stay dense."""
        self.patch = model.config.patch_size
        return refiner_and_layers(model)

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """Fraction of the run that is left: the model's timestep rises from 0 to 1."""
        return 1 - inputs["timestep"]

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave prompts of different length unmerged: their images begin at different positions."""
        if len(set(text_lengths(inputs["encoder_attention_mask"]))) > 1:
            raise DenseFallback("the images of a batch begin at different positions")

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From the complex rotations of each sample."""
        return cos_and_sin(rope)
