"""Baselines that merge tokens by best match: ToMeSD (arXiv 2303.17604) and ToFu (arXiv 2312.01026).

1. One token of every 2 x 2 cell is a destination, the others are sources.
2. Each source is matched with its most similar destination, by cosine similarity.
3. The sources with the best matches are merged into their destinations; the others are kept.
4. After the layer every merged source takes a copy of its destination.

In ToMeSD a destination becomes the mean of its tokens. ToFu drops merged sources in the first blocks, where the model
is far from linear; in later blocks it scales the mean to the norm of its longest token. Every block computes a new
matching in every step. Written from the papers; the authors' code is not used.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from foveate.methods.base import TokenMerging, stacked, whole_sides
from foveate.ops.merging import Grid, Group, IndexMerge, Regions
from foveate.utils.cache import persistent

__all__ = ["ToFu", "ToMeSD"]


@dataclass(frozen=True, kw_only=True)
class ToMeSD(TokenMerging):
    """Token merging by best match. `keep=1.0` is exactly the dense model.

    Attributes:
        cell: (rows, columns) of a cell in tokens. Each cell has one destination, which bounds `keep` from below.
        random: Choose the destination of each cell at random, the same in every block. Otherwise the first token.

    Source: arXiv 2303.17604.
    """

    merge_cross: bool = False
    merge_mlp: bool | None = False
    cell: tuple[int, int] = (2, 2)
    random: bool = False

    per_block: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cell", whole_sides("cell", self.cell, 2))  # JSON gives a list
        least = 1 / (self.cell[0] * self.cell[1])
        if (keep := min(self.settings)) < least:
            raise ValueError(
                f"with cells of {self.cell[0]} x {self.cell[1]} tokens {least:.0%} are destinations and are kept: "
                f"use keep>={least:g} or larger cells, not keep={keep:g}"
            )

    @classmethod
    def showcase(cls) -> tuple["ToMeSD", ...]:
        """None: it is a baseline."""
        return ()

    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """The generated image in raster order as one region. Reference images are not merged."""
        self.check_plain()
        grid, *others = grids
        kept = max(round(self.settings[0] * prod(grid)), int(_destinations(stacked(grid), self.cell, False).sum()))
        groups = [Group(1, grid, kept), *(Group(1, other, prod(other), False) for other in others)]
        raster = torch.arange(sum(group.tokens for group in groups), device=device)
        return Regions(raster, raster, tuple(groups), grids[0])

    def plan(
        self,
        features: Float[Tensor, "batch image dim"],
        regions: Regions,
        destinations: tuple[Tensor, ...] | None = None,
    ) -> IndexMerge:
        """Kept tokens, and the kept token that every token is merged into."""
        group, *others = regions.groups
        rows, columns = stacked(regions.grid)
        chosen = _destinations((rows, columns), self.cell, self.random).to(features.device)
        cells = ceil(rows / self.cell[0]) * ceil(columns / self.cell[1])
        # sources, then destinations; nonzero() would have a data-dependent length, which breaks compiled graphs
        there, here = chosen.int().argsort(stable=True).split([len(chosen) - cells, cells])
        exact = features[:, : group.tokens].to(torch.promote_types(features.dtype, torch.float32))
        z = normalize(exact, dim=-1)
        similarity, match = (z[:, there] @ z[:, here].mT).max(-1)  # [batch, sources]
        alone = group.kept - len(here)  # number of sources that are kept
        ranked = similarity.argsort(dim=1, stable=True)  # least similar first
        sources = there[ranked]
        dst_index = torch.empty(len(z), group.tokens, dtype=torch.long, device=z.device)
        dst_index[:, here] = alone + torch.arange(len(here), device=z.device)
        slots = torch.arange(alone, device=z.device).expand(len(z), -1)
        dst_index.scatter_(1, sources, torch.cat([slots, alone + match.gather(1, ranked[:, alone:])], 1))
        places = torch.cat([sources[:, :alone], here.expand(len(z), -1)], 1)
        rest = torch.arange(sum(other.tokens for other in others), device=z.device).expand(len(z), -1)
        return self._merge(torch.cat([places, group.tokens + rest], 1), torch.cat([dst_index, group.kept + rest], 1))

    def _merge(self, places: Int[Tensor, "batch merged"], dst_index: Int[Tensor, "batch image"]) -> IndexMerge:
        return IndexMerge(places, dst_index)


@dataclass(frozen=True, kw_only=True)
class ToFu(ToMeSD):
    """Token fusion. `keep=1.0` is exactly the dense model.

    Attributes:
        separation: Relative depth, 0 to 1, before which blocks drop merged sources; later blocks average.

    Source: arXiv 2312.01026.
    """

    separation: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.separation <= 1:
            raise ValueError(f"separation is a relative depth in the model, 0 to 1, not {self.separation}")

    def at(self, depth: float) -> TokenMerging:
        """The method for a block at this relative depth in the model, 0 to 1."""
        return self if depth < self.separation else _LateToFu(**vars(self))

    def _merge(self, places: Tensor, dst_index: Tensor) -> IndexMerge:
        return IndexMerge(places, dst_index, pruned=True)


class _LateToFu(ToFu):
    """ToFu in the later blocks, which average."""

    def _merge(self, places: Tensor, dst_index: Tensor) -> IndexMerge:
        return IndexMerge(places, dst_index, longest=True)


@persistent
def _destinations(grid: tuple[int, int], cell: tuple[int, int], random: bool) -> Tensor:
    """Mask of the destinations in raster order. Cells at the bottom and right edges may be smaller."""
    rows, columns = (torch.arange(side) % size == 0 for side, size in zip(grid, cell, strict=True))
    first = rows[:, None] & columns
    if not random:
        return first.flatten()
    tops, lefts = first.nonzero().unbind(1)
    draw = torch.rand(2, len(tops), generator=torch.Generator().manual_seed(0))
    heights, widths = (grid[0] - tops).clamp(max=cell[0]), (grid[1] - lefts).clamp(max=cell[1])
    drawn = torch.zeros_like(first)
    drawn[tops + (draw[0] * heights).long(), lefts + (draw[1] * widths).long()] = True
    return drawn.flatten()
