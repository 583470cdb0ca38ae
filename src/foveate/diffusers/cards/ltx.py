"""LTX-Video and LTX-2: video tokens alone; text, and audio in LTX-2, by cross-attention."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from foveate.diffusers.card import Card, TokenLayout, video
from foveate.methods.base import DenseFallback
from foveate.utils.cache import cached_by_tensor

__all__ = ["LTXCard"]


class LTXCard(Card):
    """`LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`. The model rotates queries and keys itself."""

    start_percent = 0.4
    attention = {"attn1": False}  # noqa: RUF012
    merging_unsupported_reason = "rotates each head in its own way"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The video, with the frames of conditions before or after it; its grid is given or read from coordinates."""
        if inputs.get("video_self_attention_mask") is not None:
            raise DenseFallback("an attention mask was passed")
        grid: Any = tuple(inputs.get(name) for name in ("num_frames", "height", "width"))
        tokens, places = inputs["hidden_states"].shape[1], inputs.get("video_coords")
        if None not in grid and prod(grid) == tokens:
            return TokenLayout((video(*grid),))
        if places is None:
            raise DenseFallback("neither num_frames, height and width nor video_coords tell the grid of the tokens")
        return TokenLayout((video(*_grid_of(places)),))


@cached_by_tensor
def _grid_of(places: Tensor) -> tuple[int, int, int]:
    """(frames, rows, columns) of (time, row, column) of each token, [batch, 3, tokens] or its start and end."""
    places = (places if places.ndim == 3 else places[..., 0]).detach().cpu()
    rows, columns = places[0, 1].unique(), places[0, 2].unique()
    frames = places.shape[2] // (len(rows) * len(columns))
    raster = torch.cartesian_prod(rows, columns).mT.repeat(1, frames)
    if raster.shape[1] != places.shape[2] or (places[:, 1:] != raster).any():
        raise DenseFallback("video_coords are no frames of one size")
    return frames, len(rows), len(columns)
