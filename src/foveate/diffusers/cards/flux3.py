"""FLUX.3: blocks of the picture alone, then blocks of [text, picture, references], positions in `img_ids`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foveate.diffusers.card import Card, Stack, TokenLayout, image, text
from foveate.methods.base import DenseFallback, default_skip
from foveate.utils.cache import cached_by_tensor

__all__ = ["Flux3Card"]


class Flux3Card(Card):
    """`Flux3Transformer2DModel`. Blocks that see the text alone, or references alone, stay dense."""

    rope = "image_rotary_emb"
    rows = "temb_mod"
    joins_in_blocks = True
    merge_mlp = False
    timestep_scale = 1.0

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """[text, picture, references], or the picture alone."""
        pictures = [image(*grid) for grid in _grids_of(inputs["img_ids"])]
        if isinstance(holder, nn.ModuleList):
            return TokenLayout(tuple(pictures))
        if (places := inputs.get("image_cond_ids")) is not None:
            pictures += [image(*grid) for grid in _grids_of(places)]
        return TokenLayout((text(inputs["encoder_hidden_states"].shape[1]), *pictures))

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks of the picture, then those of all tokens."""
        alone, joint = model.mode_blocks["image"], model.single_transformer_blocks
        yield Stack("mode_blocks.image", alone, alone, "picture", len(alone))
        yield Stack("single_transformer_blocks", joint, model, "joint", default_skip(len(joint)))

    def is_single_stream(self, block: nn.Module) -> bool:
        """False for all blocks: each token has a modulation of its own after the norm."""
        return False


@cached_by_tensor
def _grids_of(places: Tensor) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each image, given (time, row, column, image) of its tokens."""
    images = places[:, 3].detach().cpu().diff().nonzero().flatten() + 1
    return tuple(_grid_of(one[:, 1:3]) for one in places.detach().cpu().tensor_split(images))


def _grid_of(places: Tensor) -> tuple[int, int]:
    rows, columns = (axis.unique() for axis in places.unbind(1))
    if not torch.equal(torch.cartesian_prod(rows, columns), places):
        raise DenseFallback("img_ids are no complete raster")
    return len(rows), len(columns)
