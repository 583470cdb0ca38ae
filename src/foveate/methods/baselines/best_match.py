"""Token merging by best match: ToMeSD (arXiv 2303.17604) and ToFu (arXiv 2312.01026), baselines.

1. Of every 2 x 2 cells of tokens one is a destination, the others are sources.
2. Each source has a best match among the destinations, by cosine similarity.
3. The sources with the best matches go to their destinations; the others are kept.
4. Afterwards a source that went takes what its destination became.

In ToMeSD a destination becomes the mean of what went to it. In ToFu what goes is left out in the first blocks, where
the model is far from linear; in the later ones the mean is made as long as the longest of its tokens. Every block does
so anew in every step. Written from the papers; the authors' code is not used.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from foveate.methods.base import TokenMerging
from foveate.ops.merging import Grid, Group, Picked, Regions
from foveate.utils.cache import persistent

__all__ = ["ToFu", "ToMeSD"]


@dataclass(frozen=True, kw_only=True)
class ToMeSD(TokenMerging):
    """Token merging by best match. `keep=1.0` is exactly the dense model.

    Attributes:
        cell: (rows, columns) of tokens, one of which is a destination: that fraction is the least that can be kept.
        random: Draw the destination of each cell by lot, the same ones in every block. Else it is the first.
    """

    merge_cross: bool = False
    merge_mlp: bool | None = False
    cell: tuple[int, int] = (2, 2)
    random: bool = False

    per_block: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.cell) != 2 or any(int(side) != side or side < 1 for side in self.cell):
            raise ValueError(f"cell must be two positive whole numbers such as (2, 2), not {self.cell!r}")
        object.__setattr__(self, "cell", (int(self.cell[0]), int(self.cell[1])))  # of JSON it is a list
        least = 1 / (self.cell[0] * self.cell[1])
        if self.keep < least:
            raise ValueError(
                f"of cells of {self.cell[0]} x {self.cell[1]} tokens {least:.0%} are destinations and are kept: "
                f"use keep>={least:g} or larger cells, not keep={self.keep:g}"
            )

    @classmethod
    def showcase(cls) -> tuple["ToMeSD", ...]:
        """None: it is a baseline."""
        return ()

    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """The image in raster order as one region; reference images are left alone."""
        (height, width), *others = grids
        kept = max(round(self.keep * height * width), int(_destinations(grids[0], self.cell, False).sum()))
        groups = [Group(1, height, width, kept), *(Group(1, *grid, grid[0] * grid[1], False) for grid in others)]
        raster = torch.arange(sum(group.tokens for group in groups), device=device)
        return Regions(raster, raster, tuple(groups), grids[0])

    def plan(
        self,
        features: Float[Tensor, "batch image dim"],
        regions: Regions,
        destinations: tuple[Tensor, ...] | None = None,
    ) -> Picked:
        """Which tokens are kept, and which of those every token becomes a part of."""
        group, *others = regions.groups
        chosen = _destinations(regions.grid, self.cell, self.random).to(features.device)
        cells = ceil(regions.grid[0] / self.cell[0]) * ceil(regions.grid[1] / self.cell[1])
        # sources, then destinations; not by nonzero, whose length compiled code does not know
        there, here = chosen.int().argsort(stable=True).split([len(chosen) - cells, cells])
        exact = features[:, : group.tokens].to(torch.promote_types(features.dtype, torch.float32))
        z = normalize(exact, dim=-1)
        likeness, match = (z[:, there] @ z[:, here].mT).max(-1)  # [batch, sources]
        alone = group.kept - len(here)  # sources that are kept
        ranked = likeness.argsort(dim=1, stable=True)  # the least alike first
        sources = there[ranked]
        dst_index = torch.empty(len(z), group.tokens, dtype=torch.long, device=z.device)
        dst_index[:, here] = alone + torch.arange(len(here), device=z.device)
        slots = torch.arange(alone, device=z.device).expand(len(z), -1)
        dst_index.scatter_(1, sources, torch.cat([slots, alone + match.gather(1, ranked[:, alone:])], 1))
        places = torch.cat([sources[:, :alone], here.expand(len(z), -1)], 1)
        rest = torch.arange(sum(other.tokens for other in others), device=z.device).expand(len(z), -1)
        return self._picked(torch.cat([places, group.tokens + rest], 1), torch.cat([dst_index, group.kept + rest], 1))

    def _picked(self, places: Int[Tensor, "batch merged"], dst_index: Int[Tensor, "batch image"]) -> Picked:
        return Picked(places, dst_index)


@dataclass(frozen=True, kw_only=True)
class ToFu(ToMeSD):
    """Token fusion. `keep=1.0` is exactly the dense model.

    Attributes:
        separation: Blocks that come before this fraction of the model prune, the others merge.
        depth: Where a block is; set where the method is applied.
    """

    separation: float = 0.5
    depth: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.separation <= 1:
            raise ValueError(f"separation is a fraction of the model, 0 to 1, not {self.separation}")

    def at(self, depth: float) -> TokenMerging:
        """The method for a block that so much of the model comes before."""
        return replace(self, depth=float(depth >= self.separation))  # two kinds of blocks: a graph each when compiled

    def _picked(self, places: Tensor, dst_index: Tensor) -> Picked:
        pruned = self.depth < self.separation
        return Picked(places, dst_index, pruned=pruned, longest=not pruned)


@persistent
def _destinations(grid: Grid, cell: tuple[int, int], random: bool) -> Tensor:
    """Whether each token is the destination of its cell, in raster order; cells at the far edges may be smaller."""
    rows, columns = (torch.arange(side) % size == 0 for side, size in zip(grid, cell, strict=True))
    first = rows[:, None] & columns
    if not random:
        return first.flatten()
    tops, lefts = first.nonzero().unbind(1)
    lot = torch.rand(2, len(tops), generator=torch.Generator().manual_seed(0))
    heights, widths = (grid[0] - tops).clamp(max=cell[0]), (grid[1] - lefts).clamp(max=cell[1])
    drawn = torch.zeros_like(first)
    drawn[tops + (lot[0] * heights).long(), lefts + (lot[1] * widths).long()] = True
    return drawn.flatten()
