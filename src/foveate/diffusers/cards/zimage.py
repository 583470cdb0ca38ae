"""Z-Image: [image, caption], each padded with learned tokens that take part in attention as text does."""

from collections.abc import Iterator
from typing import Any

from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor, nn

from foveate.diffusers.backend import context_of
from foveate.diffusers.card import Card, Stack, TokenLayout, cos_and_sin, image, padding, refiner_and_layers, text
from foveate.methods.base import DenseFallback

__all__ = ["ZImageCard"]


class ZImageCard(Card):
    """`ZImageTransformer2DModel`. Its first blocks, the refiners, see the image or the caption alone."""

    attention = {"attention": True}  # noqa: RUF012
    rope = "freqs_cis"
    timestep_scale = 1.0
    padding_mask = "attn_mask"
    merged_modules = {"attention": "attn", "feed_forward": "mlp"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[image, its padding, caption, its padding], padded to the longest; image refiners see no caption."""
        pictures, captions = inputs["x"], inputs["cap_feats"]
        if isinstance(pictures[0], list):
            raise DenseFallback("Z-Image-Omni modulates each token by its image")
        if any(picture.shape != pictures[0].shape for picture in pictures):
            raise DenseFallback("the images differ in size between the samples of the batch")
        _, frames, height, width = pictures[0].shape
        if frames != inputs.get("f_patch_size", 1):
            raise DenseFallback("latents with several frames are no images")
        blocks: Any = holder if isinstance(holder, nn.ModuleList) else holder.layers
        if context_of(blocks[0].attention.processor):
            raise DenseFallback("diffusers has no context parallelism for Z-Image")
        rows, columns = (side // inputs.get("patch_size", 2) for side in (height, width))
        alone = image(rows, columns), text(padding_of(rows * columns))
        if holder is blocks:
            return [TokenLayout(alone)]
        lengths = [len(caption) + padding_of(len(caption)) for caption in captions]
        return [TokenLayout((*alone, text(length), padding(max(lengths) - length))) for length in lengths]

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks that refine the image, then the main blocks; those that refine the caption stay dense."""
        return refiner_and_layers(model)

    def samples(self, inputs: dict[str, Any]) -> Tensor:
        """The picture, as often as there are samples."""
        first = inputs["x"][0]
        first = first[-1] if isinstance(first, list) else first
        return first.expand(len(inputs["x"]), *first.shape)

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """Fraction of the run that is left: `t` rises from 0 to 1."""
        return 1 - inputs["t"]

    def rotation(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """From the complex rotations of each sample: the position of its image begins where its caption ends."""
        return cos_and_sin(rope)


def padding_of(tokens: int) -> int:
    """Number of learned tokens that Z-Image appends to an image or a caption."""
    return -tokens % SEQ_MULTI_OF
