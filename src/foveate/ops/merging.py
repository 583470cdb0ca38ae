"""Fewer tokens, and all of them again: regions within which tokens merge, and merges by weights or by picks."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops.block_table import BlockTable
from foveate.ops.region_matmul import region_matmul
from foveate.ops.region_update import plus, region_update
from foveate.utils.cache import persistent

__all__ = ["Group", "Grouped", "Merge", "Picked", "Regions", "places_of", "together"]

Grid = tuple[int, int]


class Group(NamedTuple):
    """Neighbouring regions of one shape.

    Attributes:
        number: How many there are.
        rows: Tokens along the first side of each.
        columns: Tokens along the second.
        kept: How many tokens of each are kept.
        merges: Whether they are merged at all.
    """

    number: int
    rows: int
    columns: int
    kept: int
    merges: bool = True

    @property
    def tokens(self) -> int:
        """Of each region."""
        return self.rows * self.columns


class Regions(NamedTuple):
    """Within what tokens merge, for one size.

    Attributes:
        order: Raster index of the image token at each place; regions follow one another.
        inverse: Place of each raster token.
        groups: The regions in that order, neighbours of one shape together.
        grid: (rows, columns) of the picture.
        picked: Raster indices of the picture's tokens that others merge into, as the first sample has them at the last
            site of a model; None until there is a plan.
    """

    order: Int[Tensor, "image"]
    inverse: Int[Tensor, "image"]
    groups: tuple[Group, ...]
    grid: Grid
    picked: Int[Tensor, "picked"] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each group."""
        return tuple(group.number * group.tokens for group in self.groups)

    @property
    def kept(self) -> int:
        """How many tokens are left of all."""
        return sum(group.number * group.kept for group in self.groups)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """None: everyone attends to everyone who is left."""
        return ()

    @property
    @persistent
    def tile_maps(self) -> tuple[Int[Tensor, "rows columns"], ...]:
        """The region of every token of the picture, to draw."""
        number = torch.arange(sum(group.number for group in self.groups))
        sizes = torch.tensor([group.tokens for group in self.groups for _ in range(group.number)])
        regions = number.repeat_interleave(sizes)[self.inverse.cpu()]
        return (regions[: self.grid[0] * self.grid[1]].view(self.grid),)

    @persistent
    def merged(self, table: BlockTable, text: int) -> BlockTable:
        """A table over [text | image in this order] for the merged tokens: the same blocks with fewer tokens each.

        Borders of blocks that read and are read alike may lie within a region.

        Raises:
            ValueError: If tokens of one region read, or are read by, different ones.
        """
        self._check_borders(table, text)
        left = [torch.ones(text, dtype=torch.long)]
        for group in self.groups:
            region = torch.ones(group.tokens, dtype=torch.long)
            if group.merges:
                region[0], region[1:] = group.kept, 0
            left.append(region.repeat(group.number))
        starts = torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(left).cumsum(0)]).int()  # of each token
        queries, keys = (starts[x.long().cpu()].to(x.device) for x in table[:2])
        return BlockTable(queries, keys, *table[2:])

    def _check_borders(self, table: BlockTable, text: int) -> None:
        begins, place = {0, *range(text + 1)}, text
        for group in self.groups:
            step = group.tokens if group.merges else 1
            begins |= set(range(place, place + group.number * group.tokens, step))
            place += group.number * group.tokens
        if across := [border for border in table.borders() if border < place and border not in begins]:
            raise ValueError(f"tokens that would merge lie on both sides of a border of the sparse tiles, at {across}")


class Merge(NamedTuple):
    """How image tokens, in the order of their regions, become fewer, and many again.

    Attributes:
        lengths: Tokens of each group of regions.
        gather: For each group [plans, count, kept, tokens], rows that sum to 1; None where nothing merges. There is a
            plan for each sample, or one for all.
        spread: The same, columns that sum to 1.
        chosen: For each group the destinations within their regions [plans, count, kept], ascending.
        places: Of the destinations in the order of the tokens, [plans, merged].
    """

    lengths: tuple[int, ...]
    gather: tuple[Tensor | None, ...]
    spread: tuple[Tensor | None, ...]
    chosen: tuple[Tensor, ...]
    places: Int[Tensor, "plans merged"]

    def merge(
        self, x: Float[Tensor, "batch all dim"], ahead: int = 0, order: Int[Tensor, "all"] | None = None
    ) -> Float[Tensor, "batch fewer dim"]:
        """Every destination becomes the mean of what it is given; `ahead` tokens of text in front stay.

        Args:
            x: Tokens, in the order of their regions.
            ahead: Tokens of text in front.
            order: Of the regions: x is in raster order.
        """
        return _each(self.gather, x, self.lengths, ahead, order)

    def unmerge(self, y: Float[Tensor, "batch fewer dim"], ahead: int = 0) -> Float[Tensor, "batch all dim"]:
        """Every token takes from the destinations what it gave them a part of."""
        lengths = [chosen.shape[1] * chosen.shape[2] for chosen in self.chosen]
        return _each([weights if weights is None else weights.mT for weights in self.spread], y, lengths, ahead)

    def update(
        self,
        x: Float[Tensor, "batch all dim"],
        before: Float[Tensor, "batch fewer dim"],
        after: Float[Tensor, "batch fewer dim"],
        order: Int[Tensor, "all"] | None = None,
    ) -> Float[Tensor, "batch all dim"]:
        """x, with what became of its merged tokens spread over all: ``x + unmerge(after - before)``.

        Args:
            x: Tokens, in the order of their regions.
            before: The same merged.
            after: What became of those.
            order: See `merge`.
        """
        weights = [weights.mT for weights in self.spread if weights is not None]
        if len(weights) == len(self.spread):
            return region_update(weights, x, before, after, order)
        return plus(x, self.unmerge(after - before), order)

    def rope(self, rows: Float[Tensor, "image dim"]) -> Float[Tensor, "plans merged dim"]:
        """The rows of the destinations: a merged token stands where its destination stands."""
        return rows[self.places]

    def log_sizes(self) -> Float[Tensor, "1 merged"]:
        """The logarithm of how many tokens each merged token stands for, on average over its region."""
        sizes = [
            chosen.new_ones(1, chosen.shape[1] * chosen.shape[2], dtype=torch.float32)
            * (1 if weights is None else weights.shape[3] / weights.shape[2])
            for chosen, weights in zip(self.chosen, self.gather, strict=True)
        ]
        return torch.cat(sizes, 1).log()


class Picked(NamedTuple):
    """Every token goes to one of the picked ones and takes what becomes of that one.

    Attributes:
        places: The picked tokens [plans, merged].
        dst_index: Which of them each token goes to [plans, image].
        pruned: A picked token stays as it is; what goes to it is left out. Otherwise it becomes their mean.
        longest: Make a mean as long as the longest of its tokens.
    """

    places: Int[Tensor, "plans merged"]
    dst_index: Int[Tensor, "plans image"]
    pruned: bool = False
    longest: bool = False

    @property
    def chosen(self) -> tuple[Tensor, ...]:
        """Nothing that a later plan could begin with."""
        return ()

    def merge(
        self, x: Float[Tensor, "batch all dim"], ahead: int = 0, order: Int[Tensor, "all"] | None = None
    ) -> Float[Tensor, "batch fewer dim"]:
        """The picked tokens, with what goes to them; see `Merge.merge`."""
        x = x if order is None else x.index_select(1, order)
        if ahead:
            return torch.cat([x[:, :ahead], self.merge(x[:, ahead:])], 1)
        if self.pruned:
            return x.take_along_dim(self.places[..., None], 1)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        index = self.dst_index[..., None].expand_as(x)
        mean = exact.new_zeros(len(x), self.places.shape[1], x.shape[2])
        mean = mean.scatter_reduce(1, index, exact, "mean", include_self=False)
        if self.longest:
            lengths = exact.norm(dim=-1)
            longest = lengths.new_zeros(mean.shape[:2]).scatter_reduce(1, index[..., 0], lengths, "amax")
            mean = torch.nn.functional.normalize(mean, dim=-1) * longest[..., None]
        return mean.to(x.dtype)

    def unmerge(self, y: Float[Tensor, "batch fewer dim"], ahead: int = 0) -> Float[Tensor, "batch all dim"]:
        """Every token takes that of the one it went to."""
        if ahead:
            return torch.cat([y[:, :ahead], self.unmerge(y[:, ahead:])], 1)
        return y.take_along_dim(self.dst_index[..., None], 1)

    def update(
        self,
        x: Float[Tensor, "batch all dim"],
        before: Float[Tensor, "batch fewer dim"],
        after: Float[Tensor, "batch fewer dim"],
        order: Int[Tensor, "all"] | None = None,
    ) -> Float[Tensor, "batch all dim"]:
        """Every token with what became of the one it went to; see `Merge.update`."""
        return plus(x, self.unmerge(after - before), order)

    def rope(self, rows: Float[Tensor, "image dim"]) -> Float[Tensor, "plans merged dim"]:
        """The rows of the picked tokens."""
        return rows[self.places]

    def log_sizes(self) -> Float[Tensor, "plans merged"]:
        """The logarithm of how many tokens went to each pick."""
        sizes = torch.zeros_like(self.places, dtype=torch.float32)
        return sizes.scatter_add(1, self.dst_index, torch.ones_like(self.dst_index, dtype=torch.float32)).log()


Grouped = Merge | Picked
"""How tokens become fewer: `merge`, `unmerge`, `update`, `rope`."""


def _each(
    weights: Sequence[Tensor | None], x: Tensor, lengths: Sequence[int], ahead: int, order: Tensor | None = None
) -> Tensor:
    """Every group of regions times its matrices, behind what is ahead of them."""
    if len(weights) == 1 and weights[0] is not None:
        return region_matmul(weights[0], x, ahead, order)
    if order is not None:
        text, *places = order.split([ahead, *lengths])
        both = zip(weights, places, strict=True)
        parts = (x[:, rows] if w is None else region_matmul(w, x, 0, rows) for w, rows in both)
        return torch.cat([x[:, text], *parts], 1)
    text, *parts = x.split([ahead, *lengths], 1)
    return torch.cat(
        [text, *(p if w is None else region_matmul(w, p) for w, p in zip(weights, parts, strict=True))], 1
    )


def places_of(regions: Regions, chosen: Sequence[Tensor]) -> Int[Tensor, "plans merged"]:
    """Of picks within regions [plans, number, kept], their places in the order of the tokens."""
    first, places = 0, list[Tensor]()
    for group, picks in zip(regions.groups, chosen, strict=True):
        starts = first + group.tokens * torch.arange(group.number, device=picks.device)
        places.append((picks + starts[:, None]).flatten(1))
        first += group.number * group.tokens
    return torch.cat(places, 1)


def together(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Neighbours of one shape as one group."""
    return tuple(group._replace(number=len(list(same))) for group, same in groupby(groups))
