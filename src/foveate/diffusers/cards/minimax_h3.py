"""MiniMax-H3: [text, keyframes or references, audio, video] packed into one sequence, positions in `position_ids`."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from foveate.diffusers.card import Card, Stack, TokenLayout, text, video
from foveate.methods.base import DenseFallback, TokenMerging
from foveate.utils.cache import cached_by_tensor

__all__ = ["MiniMaxH3Card"]


class MiniMaxH3Card(Card):
    """`MiniMaxH3Transformer3DModel`. All but the generated video attend as text does: conditions and audio too."""

    start_percent = 0.4
    timestep_scale = 1.0
    rope = "rotary_emb"
    rotates_halves = True
    rows = "adaln_indices"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The video is the last run of rows in `video_indices`."""
        places = inputs["position_ids"]
        grid = _grid_of(places, _first_row(inputs["video_indices"], len(places)))
        return TokenLayout((text(len(places) - prod(grid)), video(*grid)), packed=True)

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks, which are given all tokens in one tensor; those that refine the text stay dense."""
        (stack,) = super().stacks(model)
        yield stack._replace(joined=True)

    def samples(self, inputs: dict[str, Any]) -> Tensor:
        """The text, whose dtype is that of the blocks."""
        return inputs["encoder_hidden_states"]

    def timestep(self, inputs: dict[str, Any]) -> Tensor:
        """Fraction of the run that is left: the timestep of the video, the last row, rises from 0 to 1."""
        return 1 - inputs["timestep"].index_select(0, inputs["timestep_indices"][-1:])

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave whole blocks unmerged where rows of the video have different timesteps or tags."""
        first = _first_row(inputs["video_indices"], len(inputs["position_ids"]))
        alike = all(_alike(inputs[name], first) for name in ("timestep_indices", "token_tags"))
        if method.granularity == "block" and not alike:
            raise DenseFallback("each token has its own modulation: merge with granularity='module'")


@cached_by_tensor
def _first_row(rows: Tensor, tokens: int) -> int:
    """First of the consecutive rows at the end of a sequence."""
    rows = rows.detach().cpu()
    gaps = (rows.diff() != 1).nonzero()
    if not len(rows) or rows[-1] != tokens - 1:
        raise DenseFallback("the sequence does not end with the video")
    return int(rows[gaps[-1] + 1] if len(gaps) else rows[0])


@cached_by_tensor
def _grid_of(places: Tensor, first: int) -> tuple[int, int, int]:
    """(frames, rows, columns) of the tokens from `first` on, given (time, row, column) of each."""
    places = places[first:].detach().cpu()
    _, sizes = places[:, 0].unique_consecutive(return_counts=True)
    rows, columns = (places[: sizes[0], axis].unique() for axis in (1, 2))
    raster = torch.cartesian_prod(rows, columns).repeat(len(sizes), 1)
    if raster.shape[0] != len(places) or (sizes != sizes[0]).any() or (places[:, 1:] != raster).any():
        raise DenseFallback("position_ids of the video are no frames of one size")
    return len(sizes), len(rows), len(columns)


@cached_by_tensor
def _alike(values: Tensor, first: int) -> bool:
    """Whether all values from `first` on are equal."""
    return bool((values[first:] == values[-1]).all())
