"""Models whose text has keys and no queries: PRX, Nucleus-Image, Cosmos 3; Qwen-Image 2.1 attends causally to it."""

from math import prod
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor
from torch import Tensor

from foveate.diffusers.card import Card, TokenLayout, cos_and_sin, image, patches, text, text_and_padding, video
from foveate.diffusers.cards.blocks import DispatchedProcessor
from foveate.methods.base import DenseFallback
from foveate.utils.cache import cached_by_tensor

__all__ = ["Cosmos3Card", "NucleusCard", "PRXCard", "QwenImage21Card"]

FLEX, PER_SLOT = QwenImage21FlexAttnProcessor, 4


class PRXCard(Card):
    """`PRXTransformer2DModel`: the keys of the text, then the image."""

    blocks = "blocks"
    attention = {"attention": True}  # noqa: RUF012
    rope = "image_rotary_emb"
    timestep_scale = 1.0
    merged_modules = {"attention": "attn"}  # noqa: RUF012
    padding_mask = "attention_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """The image, with the keys of the text before its own."""
        picture = patches(inputs["hidden_states"].shape[2:], holder.config.patch_size)
        texts = text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs.get("attention_mask"))
        return [TokenLayout((picture,), keys=words) for words in texts]

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From a 2 x 2 rotation for each pair of channels of the image, [batch, 1, tokens, pairs, 2, 2]."""
        cos, _, sin, _ = rope[0, 0].flatten(-2).repeat_interleave(2, -2).unbind(-1)
        return cos, sin


class NucleusCard(Card):
    """`NucleusMoEImageTransformer2DModel`: the image, then the keys of the text."""

    rope = "image_rotary_emb"
    timestep_scale = 1.0
    merged_modules = {"attn": "attn"}  # noqa: RUF012
    padding_mask = "encoder_hidden_states_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """The image, with the keys of the text after its own."""
        shapes = inputs["img_shapes"]
        frames, *grid = shapes[0] if isinstance(shapes, list) else shapes
        if frames != 1:
            raise DenseFallback("img_shapes with several frames are no images")
        texts = text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs.get("encoder_hidden_states_mask"))
        return [TokenLayout((image(*grid),), keys=words, keys_last=True) for words in texts]

    def rotation(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From the complex rotations of image and text, [tokens, pairs] each."""
        return cos_and_sin(rope[0][None])

    def unrotated(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The embedding of the text alone: the processor still rotates the keys of the text."""
        image, words = rope
        return torch.ones_like(image[:1]), words


class QwenImage21Card(Card):
    """`QwenImage21Transformer2DModel`: text and references attend causally, the image to all of them and itself."""

    timestep_scale = 1.0
    padding_mask = "encoder_hidden_states_mask"
    wrapper = DispatchedProcessor
    merging_unsupported_reason = "has text and references before the image in steps without their cache"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """The image, with the keys of text and references before its own, whether they are cached or not."""
        frames, *grid = inputs["img_shapes"][0][-1]
        if frames != 1:
            raise DenseFallback("img_shapes with several frames are no images")
        attns = (block.attn for block in holder.transformer_blocks)
        if inputs.get("kv_cache_mode") != "cached" and any(isinstance(attn.processor, FLEX) for attn in attns):
            raise DenseFallback("flex attention reads a mask of its own while it fills the cache")
        slots, mask = _slots(inputs["img_mask"]), inputs.get("encoder_hidden_states_mask")
        before = sum(PER_SLOT if slot else 1 for slot in slots) - prod(grid)
        texts = text_and_padding(before, None if mask is None else _is_real(mask, slots, before))
        return [TokenLayout((image(*grid),), keys=words) for words in texts]


@cached_by_tensor
def _slots(mask: Tensor) -> tuple[bool, ...]:
    """Where the text encoder has images; each slot stands for 2 x 2 tokens."""
    return tuple(mask[0].tolist())


@cached_by_tensor
def _is_real(mask: Tensor, slots: tuple[bool, ...], before: int) -> Tensor:
    """False where a token before the image is padding [batch, before], from a mask of what the text encoder gives."""
    images = torch.tensor(slots[: mask.shape[1]])
    repeats = torch.where(images, PER_SLOT, 1)
    return (mask.cpu().bool() | images).repeat_interleave(repeats, 1)[:, :before]


class Cosmos3Card(Card):
    """`Cosmos3OmniTransformer`: the keys of the text, then video, sound and actions, which attend to each other."""

    blocks = "layers"
    attention = {"self_attn": True}  # noqa: RUF012
    start_percent = 0.4
    merging_unsupported_reason = "has no dimension for the samples of a batch, and blocks that take the text first"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The video, then sound and actions as text, with the keys of the text before."""
        shapes, before = inputs["vision_token_shapes"], inputs["und_len"]
        others = inputs["sequence_length"] - before - prod(shapes[0])
        if len(shapes) > 1:
            raise DenseFallback("several images or videos share the sequence")
        if holder._cp_shard_fn is not None:
            raise DenseFallback("the model's own context parallelism splits the tokens")
        if not _follows(inputs["vision_sequence_indexes"], before):
            raise DenseFallback("the video does not follow the text")
        return TokenLayout((video(*shapes[0]), text(others)), keys=(text(before),))

    def samples(self, inputs: dict[str, Any]) -> Tensor:
        """The video: there is one sample."""
        return inputs["vision_tokens"][0]

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """The timestep of the patches that are noisy."""
        return inputs["vision_timesteps"][:1]


@cached_by_tensor
def _follows(positions: Tensor, first: int) -> bool:
    """Whether positions count upwards from the first."""
    return torch.equal(positions.cpu(), first + torch.arange(len(positions)))
