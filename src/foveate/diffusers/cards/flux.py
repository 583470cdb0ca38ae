"""FLUX.1 (dev, schnell, Fill, Kontext) and models alike: [text, image, references], positions in `img_ids`."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor
from torch import Tensor

from foveate.diffusers.card import Card, Segment, Segments, Stack, TokenLayout, image, text_and_padding
from foveate.methods.base import DenseFallback, default_skip
from foveate.utils.cache import cached_by_tensor

__all__ = ["BriaCard", "BriaFiboCard", "ChromaCard", "Flux2Card", "FluxCard", "grids_of"]

CACHING = Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor


class FluxCard(Card):
    """The models of FLUX.1, LongCat-Image and Ovis-Image."""

    rope = "image_rotary_emb"
    timestep_scale = 1.0
    merge_mlp = False
    joined = False  # single-stream blocks of FLUX join text and image themselves

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[text, image, references]; the grids are read from `img_ids`."""
        images = [image(*grid) for grid in grids_of(inputs["img_ids"])]
        return [TokenLayout((*words, *images)) for words in self.text(inputs)]

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The text of each sample, or of all."""
        return text_and_padding(inputs["encoder_hidden_states"].shape[1], None)

    def stacks(self, model: Any) -> Iterator[Stack]:
        """Double-stream blocks, then single-stream blocks."""
        double = model.transformer_blocks
        single = model.single_transformer_blocks
        yield Stack("transformer_blocks", double, model, "double", default_skip(len(double), double=True))
        yield Stack("single_transformer_blocks", single, model, "single", default_skip(len(single)), self.joined)


class BriaCard(FluxCard):
    """`BriaTransformer2DModel` (Bria 3.2)."""

    timestep_scale = 1000.0


class Flux2Card(FluxCard):
    """`Flux2Transformer2DModel` (dev, klein). Single-stream blocks are given text and image in one tensor."""

    joined = True
    stream = "norm", "attn"
    cache = "joint_attention_kwargs"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[text, image, references]; [text, references, image] when keys are to be cached, then [text, image]."""
        mode, cache = inputs.get("kv_cache_mode"), inputs.get("kv_cache")
        now = inputs.get("num_ref_tokens", 0) if mode == "extract" else 0
        cached = cache.num_ref_tokens if mode == "cached" and cache else 0
        if not now + cached:
            return super().layout(holder, inputs)
        attns = (attn for stack in self.stacks(holder) for b in stack.blocks for attn in self.attentions(b).values())
        if not all(isinstance(attn.processor, CACHING) for attn in attns):
            raise DenseFallback("not all processors cache keys of references: draw with Flux2KleinKVPipeline")
        [words] = self.text(inputs)
        images = [image(*grid) for grid in grids_of(inputs["img_ids"], now)]
        return [TokenLayout((*words, Segment("reference", (now,)), *images), cached)]


class ChromaCard(FluxCard):
    """`ChromaTransformer2DModel`: FLUX.1 with a mask over the padded text."""

    joined = True
    padding_mask = "attention_mask"

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The text in front of the image; its padding is left out of attention."""
        tokens, mask = inputs["encoder_hidden_states"].shape[1], inputs.get("attention_mask")
        if mask is not None and mask.dtype is not torch.bool:
            raise DenseFallback(
                "the attention mask is additive: pass prompt_embeds and a boolean prompt_attention_mask, as "
                "pipe.encode_prompt makes them with .bool()"
            )
        return text_and_padding(tokens, mask)


class BriaFiboCard(BriaCard):
    """`BriaFiboTransformer2DModel`. Its mask over the padded text is an argument of the attention modules."""

    joined = True
    padding_mask = "attention_mask"

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The text in front of the image; its padding is left out of attention."""
        mask = (inputs.get("joint_attention_kwargs") or {}).get("attention_mask")
        return text_and_padding(inputs["encoder_hidden_states"].shape[1], mask)


@cached_by_tensor
def grids_of(ids: Tensor, text: int = 0) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of every image in `img_ids`: of the picture, then of its references.

    Args:
        ids: [tokens, 3] or [batch, tokens, 3]: (image, row, column) of each token; FLUX.2 appends a fourth number.
        text: Number of text tokens that come first.

    Raises:
        DenseFallback: If an image is not a complete raster of unit steps.
        ValueError: If the samples of a batch differ.
    """
    ids = ids[..., text:, :].detach().cpu()
    if ids.ndim == 3:
        if (ids != ids[:1]).any():
            raise ValueError(
                "img_ids differ between the samples of a batch: run samples with different layouts one by one"
            )
        ids = ids[0]
    borders = (ids[:, 0].diff() != 0).nonzero().flatten() + 1
    return tuple(_read_grid(cells[:, 1:3]) for cells in ids.tensor_split(borders))


def _read_grid(cells: Tensor) -> tuple[int, int]:
    later_rows = (cells[:, 0] != cells[0, 0]).nonzero()
    width = int(later_rows[0]) if len(later_rows) else len(cells)
    height = len(cells) // width
    raster = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + cells[0].double()
    if not torch.equal(raster.to(cells.dtype), cells):  # compare in the precision of the ids: bfloat16 rounds them
        raise DenseFallback(
            f"img_ids are no complete raster of unit steps ({len(cells)} ids, {width} in the first row)"
        )
    return height, width
