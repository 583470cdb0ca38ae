"""ToMA: token merging by attention-like matrices (arXiv 2509.10918).

1. The image is cut into small windows, the tiles.
2. In every tile the tokens that represent the tile best become destinations (greedy facility location).
3. Merge: every token spreads itself over the destinations of its tile, by a sharp softmax A of cosine similarity; a
   destination becomes the weighted mean of what it receives.
4. The merged tokens go through the layer. Unmerge: every token takes back from the destinations by the transpose of A.
5. Destinations and weights are reused for several layers and steps.
"""

import logging
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import gcd, prod
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from foveate.methods.base import AttentionPlan, DenseFallback, TokenMerging, whole_sides
from foveate.ops.curves import inverse_order
from foveate.ops.facility_location import facility_location
from foveate.ops.merging import Grid, Group, Merge, Regions, merge_adjacent
from foveate.ops.soft_assignment import Assignment, soft_assignment
from foveate.utils.cache import WeakTensorCache, cached_by_tensor, persistent

__all__ = ["ToMA"]

log = logging.getLogger("foveate")

SCALE = 1000.0  # factor of the cosines in the softmax: it makes A nearly one-hot, so that A's transpose undoes a merge
SLOW_PICKS = 256  # sequential picks in one tile from which on a warning is logged
MIN_RUN = 4  # tokens of a region along the order of sparse attention


@dataclass(frozen=True, kw_only=True)
class ToMA(TokenMerging):
    """Token merging. `keep=1.0` is exactly the dense model.

    Attributes:
        tile: (rows, columns) of a tile in tokens. The paper uses (4, 4). A tile of a video spans (frames, rows,
            columns); from two sides it takes four frames and half of each side.
        weights: "soft" for the softmax; "hard" assigns each token to its most similar destination.
        granularity: Merge around whole "block"s, or around each "module" of a block as the paper does.
        merge_reference: Merge the tokens of reference images too, each image separately.

    Examples:
        >>> toma = ToMA(keep=0.5)
        >>> tokens = torch.randn(1, 64, 32)  # an 8 x 8 image
        >>> regions = toma.regions(((8, 8),))
        >>> merge = toma.plan(tokens[:, regions.order], regions)
        >>> merge.merge(tokens[:, regions.order]).shape
        torch.Size([1, 32, 32])

    Raises:
        ValueError: If an option is out of its range.

    Source: arXiv 2509.10918.
    """

    tile: tuple[int, ...] = (8, 8)
    weights: Literal["soft", "hard"] = "soft"
    dst_every: int = 10
    weights_every: int = 5
    merge_reference: bool = False
    granularity: Literal["module", "block"] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tile", whole_sides("tile", self.tile, 2, 3))  # JSON gives a list

    @classmethod
    def showcase(cls) -> tuple["ToMA", ...]:
        """Half and a quarter of the tokens."""
        return cls(keep=0.5), cls(keep=0.25)

    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """Tiles in order, grouped by shape; see `TokenMerging.regions`. Cached by all arguments.

        Raises:
            DenseFallback: If the image is smaller than a tile.
        """
        self.check_plain()
        tile = self.tile_of(grids[0])
        if any(side < size for side, size in zip(grids[0][-2:], tile[-2:], strict=True)):
            sides, sizes = (" x ".join(map(str, shape)) for shape in (grids[0], tile))
            raise DenseFallback(f"{sides} image tokens are fewer than a tile of {sizes}")
        return _regions(self, grids, device)

    def tile_of(self, grid: Grid) -> tuple[int, ...]:
        """Sides of a tile of an image or a video with this grid of tokens."""
        if len(grid) == 2:
            return self.tile[-2:]
        return self.tile if len(self.tile) == 3 else (4, *(max(1, side // 2) for side in self.tile))

    def regions_along(self, plan: AttentionPlan, grid: Grid) -> Regions:
        """Runs of consecutive tokens in the order of a sparse attention plan.

        A run has as many tokens as a tile, or the largest divisor of this number that crosses no border.

        Args:
            plan: Plan of the sparse attention in one order; a run crosses no border of its segments or tiles.
            grid: (rows, columns) of the generated image, in tokens.

        Raises:
            ValueError: If no run of 4 tokens or more fits between the borders.
        """
        self.check_plain()
        order = plan.orders[0]
        # the cache entry must not hold the order, or the order would never be freed
        groups = _RUNS.get([order], (self, plan.segments), lambda: self._runs(plan))
        return Regions(order, _inverse(order), groups, grid)

    def plan(
        self,
        features: Float[Tensor, "batch image dim"],
        regions: Regions,
        destinations: "tuple[Tensor, ...] | None" = None,
    ) -> Merge:
        """How the tokens of each region collapse onto its destinations, and back.

        Args:
            features: Token features to compare by cosine similarity, in the order of the regions.
            regions: Merge regions of this image.
            destinations: Destinations of an earlier plan (`Merge.chosen`), which get new weights. None picks new ones.
        """
        parts, groups = features.split(regions.lengths, 1), regions.groups
        given = destinations or len(groups) * (None,)
        assigned = [self._assign(part, group, picks) for part, group, picks in zip(parts, groups, given, strict=True)]
        chosen, gather, spread = zip(*assigned, strict=True)
        return Merge(regions.lengths, gather, spread, chosen, regions.positions_of(chosen))

    def _runs(self, plan: AttentionPlan) -> tuple[Group, ...]:
        size = _run_length(plan, prod(self.tile))
        groups: list[Group] = []
        for image, length in plan.segments:
            if image > 0 and not self.merge_reference:
                groups.append(Group(1, (length,), length, False))
                continue
            full, rest = divmod(length, size)
            groups += [self._group(size)] * full + [self._group(rest)] * (rest > 0)
        return merge_adjacent(groups)

    def _group(self, *shape: int) -> Group:
        return Group(1, shape, min(max(1, int(self.settings[0] * prod(shape) + 0.5)), prod(shape)))

    def _assign(
        self, features: Float[Tensor, "batch image dim"], group: Group, picks: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Destinations [batch, number, kept] of a group, and its merge and unmerge weights.

        Weights are [batch, number, kept, tokens], or None where nothing merges.
        """
        if not group.merges:
            every = torch.arange(group.tokens, device=features.device)
            return every.expand(len(features), group.number, -1), None, None
        tokens = features.unflatten(1, (group.number, group.tokens))
        if self.weights == "soft":
            return soft_assignment(tokens, group.kept, SCALE, picks)
        return _hard_assignment(tokens, group.kept, picks)


def _hard_assignment(
    tokens: Float[Tensor, "batch number tokens dim"], kept: int, picks: Int[Tensor, "batch number kept"] | None
) -> Assignment:
    """Hard `soft_assignment`: each token goes to its most similar destination."""
    z = normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
    similarity = z @ z.mT
    if picks is None:
        picks = facility_location(similarity, kept).sort(-1).values
    best = similarity.take_along_dim(picks[..., None], 2).argmax(2)
    # a destination maps to itself, even if another one is identical
    best = best.scatter(2, picks, torch.arange(kept, device=picks.device).expand_as(picks))
    spread = one_hot(best, kept).mT.to(similarity.dtype)
    gather = spread / spread.sum(-1, keepdim=True)
    return Assignment(picks, gather.to(tokens.dtype), spread.to(tokens.dtype))


_RUNS: WeakTensorCache[tuple[Group, ...]] = WeakTensorCache()
_inverse = cached_by_tensor(inverse_order)


def _run_length(plan: AttentionPlan, size: int) -> int:
    """Largest divisor of `size` whose runs cross no border of the sparse attention tiles."""
    lengths = [length for _, length in plan.segments]
    tokens = plan.tables[0].query_tokens
    starts = [tokens - sum(lengths[i:]) for i in range(len(lengths))]
    borders = {border for table in plan.tables for border in table.borders() if starts[0] < border < tokens}
    run = gcd(size, *(border - starts[bisect(starts, border) - 1] for border in borders))
    if run < min(size, MIN_RUN):
        raise ValueError(
            f"the borders of the sparse attention tiles leave runs of {run} tokens, too short for a ToMA tile of "
            f"{size} tokens: give HilbertA an align of 16 or more, and ToMA a tile of (4, 4) or (8, 8)"
        )
    return run


def _cuts(length: int, size: int) -> list[slice]:
    """Parts of a side of about `size` tokens, which differ by at most 1."""
    parts = max(1, round(length / size))
    return [slice(a, b) for a, b in pairwise(length * i // parts for i in range(parts + 1))]


@lru_cache(maxsize=64)
@persistent
def _regions(method: ToMA, grids: tuple[Grid, ...], device: str) -> Regions:
    places: list[Tensor] = []
    groups: list[Group] = []
    first = 0
    for i, grid in enumerate(grids):
        raster = torch.arange(first, first + prod(grid)).view(grid)
        first += prod(grid)
        if i > 0 and not method.merge_reference:
            places.append(raster.flatten())
            groups.append(Group(1, grid, prod(grid), False))
            continue
        windows = [raster[window] for window in product(*map(_cuts, grid, method.tile_of(grid)))]
        windows.sort(key=lambda window: window.shape)  # equal shapes become adjacent
        places += [window.flatten() for window in windows]
        groups += [method._group(*window.shape) for window in windows]
    if (most := max(group.kept for group in groups if group.merges)) > SLOW_PICKS:
        log.warning("%s picks %d tokens of a tile one after another, which is slow: use smaller tiles",
                    method.title, most)  # fmt: skip
    order = torch.cat(places)
    return Regions(order.to(device), inverse_order(order).to(device), merge_adjacent(groups), grids[0])
