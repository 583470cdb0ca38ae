"""HilbertA: sparse attention in tiles of a Hilbert curve (Zheng et al., arXiv 2509.26538).

1. Image tokens are put along a Hilbert curve: an aligned run of them is a patch of the image.
2. The curve is cut into equal runs, the tiles; a token attends within its tile: one contiguous range of keys.
3. The tiles slide from layer to layer, so that information crosses their borders.
4. Text and a central region of the image are global: they see all tokens and all tokens see them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foveate.methods.base import AttentionPlan, DenseFallback, Grid, Schedule, SparseAttention
from foveate.ops.block_table import BlockTable, block_starts, block_table
from foveate.ops.curves import CURVES, grid_order
from foveate.utils.cache import persistent

__all__ = ["HilbertA"]

BANDS = "raster", "serpentine"  # curves whose tiles are as wide as the image
IN_TITLE = "period", "slide", "centre", "curve", "reference", "dense_layers", "start_percent", "end_percent"


@dataclass(frozen=True, kw_only=True)
class HilbertA(SparseAttention):
    """Sparse attention along a Hilbert curve. `tiles=1` or `centre=1.0` is exactly the dense model.

    Attributes:
        period: Number of layers in which the tiles slide by one whole tile. 1 switches sliding off.
        tiles: Number of tiles, or a schedule of such numbers. "auto" takes the largest of 16, 8, 4 and 2 that leaves
            256 image tokens to a tile, and stays dense if none does.
        slide: Where the tiles slide. "curve" is along the curve, as in the paper: tokens on both sides of a border
            between quadrants of the curve never share a tile. "diagonal" shifts the whole curve over the image, with
            wrap-around at the edges, so that neighbouring tokens share a tile in some layer; it does not combine with
            token merging, which needs one token order for all layers. "auto" is "diagonal", but "curve" with token
            merging and for "raster" and "serpentine", whose tiles are bands.
        centre: Side of the global central region, as a fraction of each side of the image. 0 switches it off.
        curve: Token order, one of `foveate.ops.curves.CURVES`.
        reference: Treatment of reference images (Kontext). "global" makes their tokens global, like text. "tiled"
            cuts each image along its own curve, and tile j of every image sees tile j of the others: sparser.
        align: Tile borders are rounded to multiples of this number of tokens. None takes 64, or 16 for tiles of fewer
            than 128 tokens; these move no border on grids of 64 x 64 and 128 x 128.

    Examples:
        >>> plan = HilbertA(tiles=16).plan(grids=((64, 64),), text=512)
        >>> f"{plan.tables[0].sparsity():.3f}"
        '0.650'

    Raises:
        ValueError: If an option is out of its range.

    Source: arXiv 2509.26538.
    """

    period: int = 4
    tiles: int | Literal["auto"] | Schedule = "auto"
    slide: Literal["auto", "curve", "diagonal"] = "auto"
    centre: float = 0.25
    curve: str = "hilbert"
    reference: Literal["global", "tiled"] = "global"
    align: int | None = None

    scheduled: ClassVar[str] = "tiles"

    def __post_init__(self) -> None:
        super().__post_init__()
        for tiles in self.settings:
            if tiles != "auto" and (not isinstance(tiles, int) or tiles < 1):
                raise ValueError(f'tiles must be "auto" or a count of 1 or more, not {tiles!r}')
        if not isinstance(self.period, int) or self.period < 1:
            raise ValueError(f"period must be 1 layer or more, not {self.period}; period=1 switches sliding off")
        if not 0 <= self.centre <= 1:
            raise ValueError(f"centre is a fraction of each side from 0 (off) to 1 (everything), not {self.centre}")
        if self.curve not in CURVES:
            raise ValueError(f"unknown curve {self.curve!r}: choose one of {', '.join(CURVES)}")
        if self.align is not None and (not isinstance(self.align, int) or self.align < 1):
            raise ValueError(f"align must be 1 token or more, not {self.align}")

    @property
    def title(self) -> str:
        """Name, number of tiles, and the options that have an effect without token merging."""
        auto = replace(self, slide="auto")
        shown = auto if auto.slides_along_curve == self.slides_along_curve else self
        return f"HilbertA T={self.schedule_title}{shown.non_defaults(IN_TITLE)}"

    @classmethod
    def showcase(cls) -> tuple["HilbertA", ...]:
        """4 and 16 tiles, as in the paper."""
        return cls(tiles=4), cls(tiles=16)

    @property
    def slides_along_curve(self) -> bool:
        """Whether tiles slide along the curve when HilbertA is used without token merging."""
        return self.slide == "curve" or (self.slide == "auto" and self.curve in BANDS)

    def for_use_with_merging(self) -> "HilbertA":
        """The same method with tiles that slide along the curve.

        Raises:
            ValueError: If they must slide diagonally.
        """
        if self.slide == "diagonal":
            raise ValueError(
                f"{self.title} orders tokens differently from layer to layer, and token merging needs one order: "
                'use slide="auto" or "curve" beside it'
            )
        return replace(self, slide="curve")

    def plan(self, grids: tuple[Grid, ...], text: int, *, block: int = 64, device: str = "cpu") -> AttentionPlan:
        """Token order and block tables of the layers. Cached by all arguments.

        The packed sequence is [text | global references | centre | rest of the curve], with an order, a table and a
        tile map for each phase of the slide.

        Args:
            grids: (rows, columns) of the generated image, then of each reference image, in tokens; a video has
                (frames, rows, columns), and its curve is a Hilbert curve in three dimensions.
            text: Number of text tokens, which come before the image.
            block: Number of tokens in a block of the tables.
            device: Device of the orders.

        Raises:
            DenseFallback: If `tiles="auto"` and the image is too small.
            ValueError: If an explicit number of tiles leaves fewer than 32 tokens to a tile, or `text` is negative.
        """
        if text < 0:
            raise ValueError(f"the number of text tokens must be 0 or more, not {text}")
        self.check_plain()
        return _plan(self, grids, text, block, device)

    def chosen_for(self, grid: Grid) -> "HilbertA":
        """The method with "auto" resolved for this grid without token merging; errors as in `plan`."""
        slide = "curve" if self.slides_along_curve else "diagonal"
        return replace(self, tiles=self.tiles_for(grid), slide=slide)

    def moved(self, grid: Grid, tiles: int, phase: int) -> tuple[int, ...]:
        """Shift of the curve in a phase along each side of the grid, in tokens; 0 if tiles slide along the curve."""
        if self.slides_along_curve:
            return (0,) * len(grid)
        return tuple(round(side * phase / self.period / tiles ** (1 / len(grid))) for side in grid)

    def tiles_for(self, grid: Grid) -> int:
        """Number of tiles of an image or video with this grid of tokens; errors as in `plan`."""
        self.check_plain()
        tiles, cells = self.settings[0], prod(grid)
        if tiles == "auto":
            fitting = [count for count in (16, 8, 4, 2) if cells // count >= 256]
            if not fitting:
                raise DenseFallback(
                    f"{' x '.join(map(str, grid))} image tokens are too few: tiles are used from 512 tokens on"
                )
            return fitting[0]
        if tiles > 1 and cells // tiles < 32:
            raise ValueError(
                f"tiles need 32 tokens or more: {cells} image tokens cannot make {tiles} tiles; "
                f'use tiles<={max(1, cells // 32)} or tiles="auto"'
            )
        return tiles


class _Curve(NamedTuple):
    """Tokens of one image along its curve in one phase of the slide, and the borders of its tiles."""

    centre: Int[Tensor, "centre"]
    local: Int[Tensor, "local"]  # outside the centre
    borders: list[int]  # index in `local` where each tile begins; the last tile wraps around

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(tile, length) of each contiguous run of local tokens."""
        cuts = [0, *self.borders, len(self.local)]
        tiles = len(self.borders)
        return [((i - 1) % tiles, b - a) for i, (a, b) in enumerate(pairwise(cuts))]


def in_centre(grid: Grid, centre: float) -> Bool[Tensor, "cells"]:
    """Mask of the raster cells in the central region, whose sides are the fraction `centre` of the grid's."""
    inside = torch.zeros(grid, dtype=torch.bool)
    if centre:
        lengths = [max(1, round(side * centre)) for side in grid]
        inside[tuple(slice((side - n) // 2, (side + n) // 2) for side, n in zip(grid, lengths, strict=True))] = True
    return inside.flatten()


def _along_curve(method: HilbertA, grid: Grid, tiles: int, phase: int, first: int) -> _Curve:
    """The curve through an image whose raster begins at token `first`."""
    cells, along = prod(grid), 0
    order = grid_order(method.curve, *grid)
    if method.slides_along_curve:
        along = phase * cells // (tiles * method.period)
    else:
        back = [-by for by in method.moved(grid, tiles, phase)]
        order = torch.arange(cells).view(grid).roll(back, tuple(range(len(grid)))).flatten()[order]
    centre = in_centre(grid, method.centre)[order]
    # tiles are cut on the full curve, then the centre is taken out of them
    rank = torch.cat([torch.zeros(1, dtype=torch.long), (~centre).cumsum(0)])
    n_local = int(rank[-1])
    g = method.align or (64 if cells // tiles >= 128 else 16)
    cuts = (torch.arange(tiles) * cells // tiles + along) % cells
    snapped = (2 * rank[cuts].sort().values + g) // (2 * g) * g
    return _Curve(first + order[centre], first + order[~centre], snapped.clamp(max=n_local).tolist())


def _table(curves: list[_Curve], prefix: int, block: int) -> BlockTable:
    """Block table: global blocks read everything; blocks of a tile read the global blocks and their tile."""
    runs = [(-1, prefix), *(run for curve in curves for run in curve.runs)]
    blocks = [tile for tile, length in runs for _ in range(0, length, block)]
    of_tile: dict[int, list[int]] = {}
    for i, tile in enumerate(blocks):
        of_tile.setdefault(tile, []).append(i)
    shared = of_tile.get(-1, [])
    lists = [range(len(blocks)) if tile == -1 else shared + of_tile[tile] for tile in blocks]
    return block_table(lists, block_starts(*(length for _, length in runs), block=block))


class _Phase(NamedTuple):
    """Tokens of all images in one phase of the slide."""

    shared: list[tuple[int, Int[Tensor, "_"]]]  # (image, its global tokens)
    curves: dict[int, _Curve]  # by image; only images with tiles

    @property
    def parts(self) -> list[tuple[int, Int[Tensor, "_"]]]:
        """(image, tokens) of the consecutive parts of the order."""
        return self.shared + [(i, curve.local) for i, curve in self.curves.items()]


def _phase(method: HilbertA, grids: tuple[Grid, ...], tiles: int, phase: int) -> _Phase:
    references: list[tuple[int, Tensor]] = []
    curves: dict[int, _Curve] = {}
    first = 0
    for i, grid in enumerate(grids):
        if i == 0 or method.reference == "tiled":
            curves[i] = _along_curve(method, grid, tiles, phase, first)
        else:
            references.append((i, torch.arange(first, first + prod(grid))))
        first += prod(grid)
    return _Phase(references + [(i, curve.centre) for i, curve in curves.items()], curves)


@lru_cache(maxsize=64)
@persistent
def _plan(method: HilbertA, grids: tuple[Grid, ...], text: int, block: int, device: str) -> AttentionPlan:
    tiles = method.tiles_for(grids[0])
    phases = [_phase(method, grids, tiles, phase) for phase in range(method.period)]
    prefix = text + sum(len(tokens) for _, tokens in phases[0].shared)
    tables = [_table([*phase.curves.values()], prefix, block) for phase in phases]
    shape = [max(map(len, tensors)) for tensors in zip(*tables, strict=True)]
    orders = [torch.cat([tokens for _, tokens in phase.parts]).to(device) for phase in phases]
    return AttentionPlan(
        # phases of equal order share one tensor, so that values cached by it are made once
        orders=tuple(orders[:1] * len(orders) if method.slides_along_curve else orders),
        segments=tuple((image, len(tokens)) for image, tokens in phases[0].parts if len(tokens)),
        tables=tuple(table.padded(shape[0] - 1, shape[1] - 1, shape[3]) for table in tables),
        title=f"HilbertA T={tiles}",
        nominal_sparsity=1 - 1 / tiles,
        tile_maps=torch.stack([_tile_map(phase.curves[0], grids[0]) for phase in phases]),
    )


def _tile_map(curve: _Curve, grid: Grid) -> Int[Tensor, "*grid"]:
    tiles, lengths = zip(*curve.runs, strict=True)
    tile_map = torch.full((prod(grid),), -1)
    tile_map[curve.local] = torch.tensor(tiles).repeat_interleave(torch.tensor(lengths))
    return tile_map.view(grid)
