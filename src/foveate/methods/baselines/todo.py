"""ToDo: token downsampling (Smith et al. 2024, arXiv 2402.13573), a baseline.

Every token asks, but only those on a coarser grid, and the text, answer: keys and values are those of every other row
and column. Written from the paper. Here it is a block table: the tokens that answer stand in front, and nobody reads
others.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.methods.base import DenseFallback, SparseAttention
from foveate.ops.block_table import BlockTable, block_starts, block_table
from foveate.ops.curves import inverse_order
from foveate.utils.cache import persistent

__all__ = ["ToDo"]

Grid = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ToDo(SparseAttention):
    """Attention to a coarser grid of the image. `factor=1` is exactly the dense model.

    Attributes:
        factor: One row and one column in so many answer. The paper takes 2 at 1024 px, 3 at 1536 px, 4 at 2048 px.
    """

    factor: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ValueError(f"factor must be 1 or more, not {self.factor}")

    @property
    def title(self) -> str:
        """ToDo and its factor."""
        return f"ToDo f={self.factor}"

    @classmethod
    def showcase(cls) -> tuple["ToDo", ...]:
        """None: it is a baseline."""
        return ()

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> "Downsampled":
        """The tokens that answer, reference images among them, then the others.

        Raises:
            DenseFallback: If the image has fewer rows or columns than the factor.
        """
        if min(grids[0]) < self.factor:
            raise DenseFallback(
                f"{grids[0][0]} x {grids[0][1]} image tokens are too few for a factor of {self.factor}"
            )
        return _plan(self, grids, text, device)


class Downsampled(NamedTuple):
    """What ToDo decided for one size; see `foveate.methods.base.AttentionPlan`."""

    order: Int[Tensor, "image"]
    inverse: Int[Tensor, "image"]
    segments: tuple[tuple[int, int], ...]
    tables: tuple[BlockTable, ...]
    title: str
    nominal_sparsity: float
    tile_maps: tuple[None, ...] = (None,)


@lru_cache(maxsize=64)
@persistent
def _plan(method: ToDo, grids: tuple[Grid, ...], text: int, device: str) -> Downsampled:
    (height, width), *others = grids
    rows, columns = (_nearest(side, method.factor) for side in (height, width))
    answers = torch.zeros(height, width, dtype=torch.bool)
    answers[rows[:, None], columns] = True
    sampled, rest = answers.flatten().nonzero()[:, 0], (~answers).flatten().nonzero()[:, 0]
    references = torch.arange(height * width, height * width + sum(a * b for a, b in others))
    order = torch.cat([references, sampled, rest])
    front = text + len(references) + len(sampled)
    starts = block_starts(front, len(rest))
    read = range(len(block_starts(front)) - 1)
    segments = [(1 + i, a * b) for i, (a, b) in enumerate(others)] + [(0, len(sampled)), (0, len(rest))]
    return Downsampled(
        order=order.to(device),
        inverse=inverse_order(order).to(device),
        segments=tuple((image, tokens) for image, tokens in segments if tokens),
        tables=(block_table([read] * (len(starts) - 1), starts),),
        title=method.title,
        nominal_sparsity=1 - len(sampled) / (height * width),
    )


def _nearest(side: int, factor: int) -> Int[Tensor, "kept"]:
    """The rows or columns whose middles lie nearest to those of a grid that is coarser by the factor."""
    kept = side // factor
    return ((torch.arange(kept) + 0.5) * side / kept).long()
