"""Models that pack text and images into one sequence: Ideogram 4, JoyImage Edit Plus, Bria FIBO 2."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count
from diffusers.models.transformers.transformer_ideogram4 import OUTPUT_IMAGE_INDICATOR, SEQUENCE_PADDING_INDICATOR
from torch import Tensor, nn

from foveate.diffusers.card import (
    Card,
    Stack,
    TokenLayout,
    cos_and_sin,
    image,
    padding,
    patches,
    refiner_and_layers,
    text,
    text_and_padding,
    text_lengths,
)
from foveate.diffusers.cards.flux import grids_of
from foveate.diffusers.cards.self_rotating import JoyImageEditCard
from foveate.methods.base import DenseFallback, TokenMerging
from foveate.utils.cache import cached_by_tensor

__all__ = ["BriaFibo2Card", "Ideogram4Card", "JoyImageEditPlusCard"]


class Ideogram4Card(Card):
    """`Ideogram4Transformer2DModel`: [padding, text, image]; a sample attends within its segment."""

    blocks = "layers"
    attention = {"attention": True}  # noqa: RUF012
    timestep_scale = 1.0
    rope = "image_rotary_emb"
    rotates_halves = True
    merged_modules = {"attention": "attn", "feed_forward": "mlp"}  # noqa: RUF012
    padding_mask = "attention_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """Padding and text of each sample, then the image, whose grid is in `position_ids`."""
        before = _before_image(inputs["indicator"])
        texts = text_and_padding(before, _is_real(inputs["segment_ids"]))
        [grid] = grids_of(inputs["position_ids"], before)
        return [TokenLayout((*words, image(*grid))) for words in texts]

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks, which are given text and image in one tensor."""
        (stack,) = super().stacks(model)
        yield stack._replace(joined=True)

    def unrotated(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines of one and sines of zero for all tokens."""
        cos, sin = (x[:, :1] for x in rope)
        return torch.ones_like(cos), torch.zeros_like(sin)

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave whole blocks unmerged where each token has a timestep of its own."""
        if inputs["timestep"].ndim == 2 and method.granularity == "block":
            raise DenseFallback("each token has its own timestep: merge with granularity='module'")

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """Fraction of the run that is left: the model's timestep rises from 0 to 1."""
        return 1 - inputs["timestep"]


@cached_by_tensor
def _before_image(indicator: Tensor) -> int:
    """Number of tokens before the image, whose tokens end all rows."""
    pictures = (indicator == OUTPUT_IMAGE_INDICATOR).cpu()
    before = int((~pictures[0]).sum())
    if pictures[:, :before].any() or not pictures[:, before:].all():
        raise DenseFallback("the image does not end the sequence in every sample")
    return before


@cached_by_tensor
def _is_real(segments: Tensor) -> Tensor:
    """False where a token is padding [batch, tokens]."""
    segments = segments.cpu()
    real = segments == segments[:, -1:]
    if (segments[~real] != SEQUENCE_PADDING_INDICATOR).any():
        raise DenseFallback("several samples are packed into one row")
    return real


class JoyImageEditPlusCard(JoyImageEditCard):
    """`JoyImageEditPlusTransformer3DModel`: [picture, references, padding, text, padding]."""

    padding_mask = "encoder_hidden_states_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """The images of each sample, which are padded to the longest sample, then the text."""
        shapes, mask = inputs["shape_list"], inputs.get("encoder_hidden_states_mask")
        if any([*sample] != [*shapes[0]] for sample in shapes):
            raise DenseFallback("the images differ in size between the samples of the batch")
        if any(frames != 1 for frames, _, _ in shapes[0]):
            raise DenseFallback("shape_list with several frames are no images")
        images = [image(*grid) for _, *grid in shapes[0]]
        rest = inputs["hidden_states"].shape[1] - sum(one.tokens for one in images)
        filling = (text if mask is None else padding)(rest)  # without a mask it takes part in attention
        texts = text_and_padding(inputs["encoder_hidden_states"].shape[1], mask)
        return [TokenLayout((*images, filling, *words)) for words in texts]

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave images unmerged that share their tensor with padding."""
        if inputs["hidden_states"].shape[1] > sum(prod(shape) for shape in inputs["shape_list"][0]):
            raise DenseFallback("the images of a sample are padded within the sequence")

    def rotation(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From [batch, image tokens, head_dim]: text is not rotated."""
        return rope


class BriaFibo2Card(Card):
    """`BriaFibo2Transformer2DModel`: [gist of the text, picture, references], or the gist last if it is padded."""

    attention = {"attention": True}  # noqa: RUF012
    rope = "freqs_cis"
    timestep_scale = 1.0
    merged_modules = {"attention": "attn", "feed_forward": "mlp"}  # noqa: RUF012
    padding_mask = "attn_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """Gist and images; blocks that refine the images see no gist."""
        latents = inputs["hidden_states"], *(inputs.get("context_latents") or ())
        images = [patches(latent.shape[2:], self.patch) for latent in latents]
        if isinstance(holder, nn.ModuleList):
            return [TokenLayout((*images,))]
        batch, _, tokens, _ = inputs["encoder_hidden_states"].shape
        mask = inputs.get("encoder_attention_mask")
        config: Any = holder.config
        counts = compute_gist_count(
            batch * [tokens] if mask is None else [*text_lengths(mask)],
            min_gist=config.min_num_gist_tokens,
            max_gist=config.max_num_gist_tokens,
            gist_step=config.gist_step,
            min_text_len=config.gist_min_text_len,
            max_text_len=config.gist_max_text_len,
        )
        if len({*counts}) == 1:
            return [TokenLayout((text(counts[0]), *images))]
        return [TokenLayout((*images, text(n), padding(max(counts) - n))) for n in counts]

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks that refine the images, then the main blocks."""
        self.patch = model.config.patch_size
        return refiner_and_layers(model)

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From the complex rotations of each sample."""
        return cos_and_sin(rope)

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Text of models that modulate references in their own way."""
        return "modulates each token by its image"
