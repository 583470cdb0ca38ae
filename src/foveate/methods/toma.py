"""ToMA: token merging by attention-like matrices (arXiv 2509.10918).

1. The image is cut into small windows, the tiles, and its tokens are put in the order of the tiles, once per forward.
2. In every tile some tokens become destinations: those that best cover the others, picked greedily.
3. Merge: every token spreads itself over the destinations of its tile, by a sharp softmax of cosine similarity; a
   destination becomes the mean of what it was given.
4. What is merged goes through the layer. Unmerge: every token takes back from the destinations as it gave.
5. Destinations and weights are kept for several layers and steps.
"""

import logging
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import gcd, inf
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from foveate.methods.base import AttentionPlan, DenseFallback, TokenMerging
from foveate.ops.curves import inverse_order
from foveate.ops.facility_location import facility_location
from foveate.ops.merging import Grid, Group, Merge, Regions, places_of, together
from foveate.ops.soft_assignment import soft_assignment
from foveate.utils.cache import WeakTensorCache, persistent

__all__ = ["ToMA"]

log = logging.getLogger("foveate")

SOFT_ENOUGH = 50.0  # below this scale the transpose is no good inverse of the merge
RIDGE = 1e-4
MANY_ROUNDS = 256  # picks of one region, one after the other
FEWEST = 4  # tokens of a region that are worth merging


@dataclass(frozen=True, kw_only=True)
class ToMA(TokenMerging):
    """Token merging. `keep=1.0` is exactly the dense model.

    Attributes:
        mode: Within what tokens merge: "tile" windows, "stripe" bands of whole rows, or "global", the whole image.
        tile: (rows, columns) of tokens in a tile; rows of a stripe. The paper has 4 x 4.
        scale: Sharpness of the softmax.
        weights: "soft", or "hard": each token goes to one destination.
        unmerge: "transpose" of the merge, or its regularised pseudo-inverse "pinv".
        select: How destinations are picked: "greedy" by facility location, a fixed "grid", or "random" ones.
        granularity: Merge around whole "block"s, or around each "module" of a block, which the paper does.
        merge_reference: Merge the tokens of reference images too, each image within itself.
        share: One plan for each "sample", for each pair of guidance ("cfg"), or for the whole "batch".

    Examples:
        >>> toma = ToMA(keep=0.5)
        >>> tokens = torch.randn(1, 64, 32)  # an 8 x 8 image
        >>> regions = toma.regions(((8, 8),))
        >>> merge = toma.plan(tokens[:, regions.order], regions)
        >>> merge.merge(tokens[:, regions.order]).shape
        torch.Size([1, 32, 32])

    Raises:
        ValueError: If an option is out of its range, or the transpose is to undo a soft merge of small `scale`.

    Source: arXiv 2509.10918.
    """

    mode: Literal["tile", "stripe", "global"] = "tile"
    tile: tuple[int, int] = (8, 8)
    scale: float = 1000.0
    weights: Literal["soft", "hard"] = "soft"
    unmerge: Literal["transpose", "pinv"] = "transpose"
    select: Literal["greedy", "grid", "random"] = "greedy"
    dst_every: int = 10
    weights_every: int = 5
    merge_reference: bool = False
    share: Literal["sample", "cfg", "batch"] = "sample"
    granularity: Literal["module", "block"] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.tile) != 2 or any(int(side) != side or side < 1 for side in self.tile):
            raise ValueError(f"tile must be two positive whole numbers such as (4, 4), not {self.tile!r}")
        object.__setattr__(self, "tile", (int(self.tile[0]), int(self.tile[1])))  # of JSON it is a list
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if not 0 < self.scale < inf:
            raise ValueError(f"scale must be above 0 and finite, not {self.scale}")
        if self.unmerge == "transpose" and self.weights == "soft" and self.scale < SOFT_ENOUGH:
            raise ValueError(
                f"the transpose does not undo a merge of scale={self.scale}: "
                f'use unmerge="pinv", or a scale of {SOFT_ENOUGH:g} and more'
            )

    @classmethod
    def showcase(cls) -> tuple["ToMA", ...]:
        """Half and a quarter of the tokens."""
        return cls(keep=0.5), cls(keep=0.25)

    def regions(self, grids: tuple[Grid, ...], *, device: str = "cpu") -> Regions:
        """Tiles side by side, those of one shape together: see `TokenMerging`. Cached by all arguments.

        Raises:
            DenseFallback: If the image is smaller than a tile.
        """
        rows, columns = self.tile
        if self.mode == "tile" and (grids[0][0] < rows or grids[0][1] < columns):
            raise DenseFallback(
                f"{grids[0][0]} x {grids[0][1]} image tokens are less than a tile of {rows} x {columns}"
            )
        return _regions(self, grids, device)

    def regions_along(self, plan: AttentionPlan, grid: Grid) -> Regions:
        """Runs of as many tokens as a tile has, or a part of that, along the order of sparse attention.

        Args:
            plan: Of the sparse attention; nothing merges across its segments, nor across a border of its tiles.
            grid: (rows, columns) of the picture.

        Raises:
            ValueError: If the mode is not "tile", or the tiles of both do not fit together.
        """
        if self.mode != "tile":
            raise ValueError(
                f'beside sparse attention ToMA merges along its order: use mode="tile", not {self.mode!r}'
            )
        groups = _RUNS.get([plan.order], (self, plan.segments), lambda: self._runs(plan))
        return Regions(plan.order, plan.inverse, groups, grid)  # what is kept of an order must not hold it

    def plan(
        self,
        features: Float[Tensor, "batch image dim"],
        regions: Regions,
        destinations: "tuple[Tensor, ...] | None" = None,
    ) -> Merge:
        """How the tokens of each region collapse onto its destinations, and back.

        Args:
            features: What similarity is measured by, in the order of the regions.
            regions: Of this image.
            destinations: Of an earlier plan, to make new weights for. None picks new ones.

        Raises:
            ValueError: If `share="cfg"` and the batch is odd.
        """
        parts, groups = features.split(regions.lengths, 1), regions.groups
        given = destinations or len(groups) * (None,)
        assigned = [self._assign(part, group, picks) for part, group, picks in zip(parts, groups, given, strict=True)]
        chosen, gather, spread = zip(*assigned, strict=True)
        return Merge(regions.lengths, gather, spread, chosen, places_of(regions, chosen))

    def _runs(self, plan: AttentionPlan) -> tuple[Group, ...]:
        size = _between_borders(plan, self.tile[0] * self.tile[1])
        groups: list[Group] = []
        for image, length in plan.segments:
            if image > 0 and not self.merge_reference:
                groups.append(Group(1, 1, length, length, False))
                continue
            full, rest = divmod(length, size)
            groups += [self._group(1, size)] * full + [self._group(1, rest)] * (rest > 0)
        return together(groups)

    def _group(self, rows: int, columns: int) -> Group:
        return Group(1, rows, columns, min(max(1, int(self.keep * rows * columns + 0.5)), rows * columns))

    def _assign(
        self, features: Float[Tensor, "batch image dim"], group: Group, picks: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of a group: destinations [plans, count, kept], and the weights of the merge and of its way back.

        The weights are [plans, count, kept, tokens], or None where nothing merges.
        """
        plans = 1 if self.share == "batch" else len(features)
        if not group.merges:
            return torch.arange(group.tokens, device=features.device).expand(plans, group.number, -1), None, None
        if picks is None and self.select != "greedy":
            picks = self._fixed(group).to(features.device).expand(plans, -1, -1)
        tokens = features.unflatten(1, (group.number, group.tokens))
        if self.share == "sample" and self.weights == "soft" and self.unmerge == "transpose":
            return soft_assignment(tokens, group.kept, self.scale, picks)
        z = normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
        similarity = self._shared(z @ z.mT)
        if picks is None:
            picks = facility_location(similarity, group.kept).sort(-1).values
        weights = self._weights(similarity.take_along_dim(picks[..., None], 2), picks)
        back = weights if self.unmerge == "transpose" else _pseudo_inverse(weights).mT
        return picks, _mean(weights).to(tokens.dtype), back.to(tokens.dtype)

    def _fixed(self, group: Group) -> Int[Tensor, "count kept"]:
        """Destinations that do not depend on the tokens, ascending."""
        if self.select == "grid":
            return _checkerboard(group).sort().values.expand(group.number, -1)
        scores = torch.rand(group.number, group.tokens, generator=torch.Generator().manual_seed(0))
        return scores.topk(group.kept).indices.sort(-1).values

    def _weights(
        self, scores: Float[Tensor, "plans count kept tokens"], picks: Int[Tensor, "plans count kept"]
    ) -> Float[Tensor, "plans count kept tokens"]:
        """How much of each token every destination is given; over destinations it is 1."""
        if self.weights == "soft":
            return (self.scale * scores).softmax(2)
        number = torch.arange(picks.shape[2], device=picks.device).expand_as(picks)
        best = scores.argmax(2).scatter(2, picks, number)  # a destination keeps itself, whatever twins it has
        return one_hot(best, picks.shape[2]).mT.to(scores.dtype)

    def _shared(self, x: Tensor) -> Tensor:
        """The mean over those samples that share a plan, for each of them; one for all of a whole batch."""
        if self.share == "sample":
            return x
        if self.share == "batch":
            return x.mean(0, keepdim=True)
        if len(x) % 2:
            raise ValueError(
                f'share="cfg" pairs the two halves of a batch, but this one has {len(x)} samples: '
                'use share="sample" where guidance runs as two calls or not at all'
            )
        return x.unflatten(0, (2, -1)).mean(0).repeat(2, *[1] * (x.ndim - 1))


CHOICES = {
    "mode": ("tile", "stripe", "global"),
    "weights": ("soft", "hard"),
    "unmerge": ("transpose", "pinv"),
    "select": ("greedy", "grid", "random"),
    "share": ("sample", "cfg", "batch"),
}


_RUNS: WeakTensorCache[tuple[Group, ...]] = WeakTensorCache()


def _between_borders(plan: AttentionPlan, size: int) -> int:
    """The longest run that divides `size` and crosses no border of the tiles of sparse attention."""
    lengths = [length for _, length in plan.segments]
    tokens = plan.tables[0].query_tokens
    starts = [tokens - sum(lengths[i:]) for i in range(len(lengths))]
    borders = {border for table in plan.tables for border in table.borders() if starts[0] < border < tokens}
    run = gcd(size, *(border - starts[bisect(starts, border) - 1] for border in borders))
    if run < min(size, FEWEST):
        raise ValueError(
            f"between the borders of the sparse tiles are runs of {run} tokens, and a tile of ToMA has {size}: give "
            "HilbertA an align of 16 or more, and ToMA a tile of 4 x 4, or of 8 x 8"
        )
    return run


def _mean(weights: Float[Tensor, "plans count kept tokens"]) -> Float[Tensor, "plans count kept tokens"]:
    """Weights whose rows sum to 1."""
    return weights / weights.sum(-1, keepdim=True)


def _pseudo_inverse(weights: Float[Tensor, "plans count kept tokens"]) -> Float[Tensor, "plans count tokens kept"]:
    """What undoes a merge as well as anything can, by a ridge solve; constant tokens stay constant."""
    gather = _mean(weights)
    gram = gather @ gather.mT
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    back = torch.linalg.solve(gram + ridge * torch.eye(gram.shape[-1]).to(gram), gather).mT
    return back + (1 - back.sum(-1, keepdim=True)) * weights.mT


@persistent
def _checkerboard(group: Group) -> Int[Tensor, "kept"]:
    """Evenly spread cells of a region: the black ones first."""
    cells = torch.cartesian_prod(torch.arange(group.rows), torch.arange(group.columns)).sum(1)
    black_first = (cells % 2).argsort(stable=True)
    black = int((cells % 2 == 0).sum())
    if group.kept >= black:
        return black_first[: group.kept]
    return black_first[torch.arange(group.kept) * black // group.kept]


def _cuts(length: int, size: int) -> list[tuple[int, int]]:
    """Parts of a side that are as equal as can be, and about `size` long."""
    parts = max(1, round(length / size))
    return list(pairwise(length * i // parts for i in range(parts + 1)))


@lru_cache(maxsize=64)
@persistent
def _regions(method: ToMA, grids: tuple[Grid, ...], device: str) -> Regions:
    places: list[Tensor] = []
    groups: list[Group] = []
    first = 0
    for i, (height, width) in enumerate(grids):
        raster = torch.arange(first, first + height * width).view(height, width)
        first += height * width
        if i > 0 and not method.merge_reference:
            places.append(raster.flatten())
            groups.append(Group(1, height, width, height * width, False))
            continue
        shapes = {"tile": method.tile, "stripe": (method.tile[0], width), "global": (height, width)}
        rows, columns = shapes[method.mode]
        windows = [raster[a:b, c:d] for (a, b), (c, d) in product(_cuts(height, rows), _cuts(width, columns))]
        windows.sort(key=lambda window: window.shape)  # at most four shapes, those of one shape side by side
        places += [window.flatten() for window in windows]
        groups += [method._group(*window.shape) for window in windows]
    if (most := max(group.kept for group in groups if group.merges)) > MANY_ROUNDS:
        log.warning("%s picks %d tokens of a region one after another, which takes long: smaller regions "
                    'are as good, mode="tile" above all', method.title, most)  # fmt: skip
    order = torch.cat(places)
    return Regions(order.to(device), inverse_order(order).to(device), together(groups), grids[0])
