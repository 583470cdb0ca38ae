"""ToDo: token downsampling (Smith et al. 2024, arXiv 2402.13573), a baseline.

All tokens are queries, but only the text and the image tokens on a coarser grid are keys and values. Here this is a
block table: the tokens that serve as keys come first, and no block reads the others. Written from the paper.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.methods.base import AttentionPlan, DenseFallback, Grid, SparseAttention, stacked
from foveate.ops.block_table import block_starts, block_table
from foveate.utils.cache import persistent

__all__ = ["ToDo"]


@dataclass(frozen=True, kw_only=True)
class ToDo(SparseAttention):
    """Attention to a coarser grid of image tokens. `factor=1` is exactly the dense model.

    Attributes:
        factor: Reduction of the rows and columns of keys. The paper uses 2 at 1024 px, 3 at 1536 px and 4 at 2048 px.

    Source: arXiv 2402.13573.
    """

    factor: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ValueError(f"factor must be 1 or more, not {self.factor}")

    @property
    def title(self) -> str:
        """Name and factor."""
        return f"ToDo f={self.factor}"

    @classmethod
    def showcase(cls) -> tuple["ToDo", ...]:
        """None: it is a baseline."""
        return ()

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """Order and table: first the keys (reference images and sampled tokens), then the other tokens.

        Raises:
            DenseFallback: If the image has fewer rows or columns than the factor.
        """
        if min(grids[0][-2:]) < self.factor:
            sides = " x ".join(map(str, grids[0]))
            raise DenseFallback(f"{sides} image tokens are too few for a factor of {self.factor}")
        return _plan(self, grids, text, device)


@lru_cache(maxsize=64)
@persistent
def _plan(method: ToDo, grids: tuple[Grid, ...], text: int, device: str) -> AttentionPlan:
    height, width = stacked(grids[0])
    others = [prod(grid) for grid in grids[1:]]
    rows, columns = (_nearest(side, method.factor) for side in (height, width))
    is_key = torch.zeros(height, width, dtype=torch.bool)
    is_key[rows[:, None], columns] = True
    sampled, rest = is_key.flatten().nonzero()[:, 0], (~is_key).flatten().nonzero()[:, 0]
    references = torch.arange(height * width, height * width + sum(others))
    order = torch.cat([references, sampled, rest])
    front = text + len(references) + len(sampled)
    starts = block_starts(front, len(rest))
    read = range(len(block_starts(front)) - 1)
    segments = [*enumerate(others, 1), (0, len(sampled)), (0, len(rest))]
    return AttentionPlan(
        orders=(order.to(device),),
        segments=tuple((image, tokens) for image, tokens in segments if tokens),
        tables=(block_table([read] * (len(starts) - 1), starts),),
        title=method.title,
        nominal_sparsity=1 - len(sampled) / (height * width),
    )


def _nearest(side: int, factor: int) -> Int[Tensor, "kept"]:
    """Rows or columns nearest to the cell centres of a grid coarser by the factor."""
    kept = side // factor
    return ((torch.arange(kept) + 0.5) * side / kept).long()
