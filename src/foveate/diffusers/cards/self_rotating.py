"""Models that rotate queries and keys in a way of their own: JoyImage Edit, ERNIE-Image, GLM-Image, Kandinsky."""

from typing import Any

import torch
from torch import Tensor

from foveate.diffusers.card import Card, TokenLayout, patches, text, text_and_padding
from foveate.methods.base import DenseFallback
from foveate.utils.cache import cached_by_tensor

__all__ = ["ErnieImageCard", "GlmImageCard", "JoyImageEditCard", "Kandinsky5Card", "Kandinsky6Card"]


class JoyImageEditCard(Card):
    """`JoyImageEditTransformer3DModel`: [picture, references, text]; all images have one size."""

    blocks = "double_blocks"
    rope = "image_rotary_emb"
    rotates_text = False
    returns_image_first = True
    merged_modules = {"attn": "attn", "img_mlp": "mlp"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout | list[TokenLayout]:
        """[picture, references, text]; each image is an item of the latents."""
        *items, _, frames, height, width = inputs["hidden_states"].shape
        patch = holder.config.patch_size
        if frames != 1 or patch[0] != 1:
            raise DenseFallback("latents with several frames are no images")
        pictures = (items[1] if len(items) == 2 else 1) * (patches((height, width), patch[1:]),)
        return TokenLayout((*pictures, text(inputs["encoder_hidden_states"].shape[1])))

    def rotation(self, rope: Any) -> tuple[Tensor, Tensor]:
        """Joins the embedding of the images with that of the text, which is None if the text is not rotated."""
        cos, sin = zip(*filter(None, rope), strict=True)
        return torch.cat(cos), torch.cat(sin)


class ErnieImageCard(Card):
    """`ErnieImageTransformer2DModel`: [image, text, padding]."""

    blocks = "layers"
    attention = {"self_attention": True}  # noqa: RUF012
    padding_mask = "attention_mask"
    merging_unsupported_reason = "has the samples of a batch in the second dimension of its tokens"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """The image, then the text, padded to the longest."""
        picture = patches(inputs["hidden_states"].shape[2:], holder.config.patch_size)
        tokens = inputs["text_bth"].shape[1]
        return [
            TokenLayout((picture, *words)) for words in text_and_padding(tokens, _mask_of(inputs["text_lens"], tokens))
        ]


@cached_by_tensor
def _mask_of(lengths: Tensor, tokens: int) -> Tensor:
    """False where a text of this length is padded [batch, tokens]."""
    return torch.arange(tokens) < lengths[:, None].cpu()


class GlmImageCard(Card):
    """`GlmImageTransformer2DModel`: [text, image]."""

    attention = {"attn1": True}  # noqa: RUF012
    rope = "image_rotary_emb"
    rotates_text = False
    rotates_halves = True
    returns_image_first = True
    merged_modules = {"attn1": "attn"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The text, then the image."""
        caches = inputs.get("kv_caches")
        if caches is not None and caches[0].mode in ("write", "read"):
            raise DenseFallback("keys of the references are cached")
        picture = patches(inputs["hidden_states"].shape[2:], holder.config.patch_size)
        return TokenLayout((text(inputs["encoder_hidden_states"].shape[1]), picture))

    def timestep(self, inputs: dict[str, Any]) -> Any:
        """Timestep of the scheduler: the pipeline passes one less."""
        return inputs["timestep"] + 1


class Kandinsky5Card(Card):
    """`Kandinsky5Transformer3DModel`, for images and videos: video tokens alone; text by cross-attention.

    The model rounds rotated queries and keys to bfloat16, Foveate to its dtype.
    """

    start_percent = 0.4
    blocks = "visual_transformer_blocks"
    attention = {"self_attention": False}  # noqa: RUF012
    rope = "rope", "rotary_emb"
    merged_modules = {"self_attention": "attn", "cross_attention": "cross", "feed_forward": "mlp"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The video; its grid is that of the latent's patches."""
        if inputs.get("sparse_params") is not None:
            raise DenseFallback("the model's own sparse attention is on")
        return TokenLayout((patches(inputs["hidden_states"].shape[1:4], holder.config.patch_size),))

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From a 2 x 2 rotation for each pair of channels, [batch, tokens, 1, pairs, 2, 2], alike in all samples."""
        cos, _, sin, _ = rope[0, :, 0].flatten(-2).repeat_interleave(2, -2).unbind(-1)
        return cos, sin


class Kandinsky6Card(Kandinsky5Card):
    """`Kandinsky6Transformer3DModel`: video tokens alone; text and audio by cross-attention."""

    attention = {"video_dec_block.self_attention": False}  # noqa: RUF012
    rope = None
    merging_unsupported_reason = "has one block for video and audio"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The video; its grid is that of the latent's patches."""
        return TokenLayout((patches(inputs["hidden_states"].shape[1:4], holder.config.patch_size),))
