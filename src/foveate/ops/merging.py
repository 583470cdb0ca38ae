"""Token merging: regions of tokens, and merges within them by weights (`Merge`) or by index (`IndexMerge`)."""

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from foveate.ops.block_table import BlockTable
from foveate.ops.joint_attention import LogLinear, Pattern
from foveate.ops.region_matmul import add_tokens, region_matmul, region_update
from foveate.utils.cache import WeakTensorCache, persistent

__all__ = ["AnyMerge", "Group", "IndexMerge", "Merge", "Regions", "merge_adjacent", "merged_pattern"]

Grid = tuple[int, ...]  # (rows, columns) of an image, (frames, rows, columns) of a video


class Group(NamedTuple):
    """Consecutive regions of one shape.

    Attributes:
        number: Number of regions.
        shape: (rows, columns) of each region in tokens; windows of videos have (frames, rows, columns).
        kept: Number of tokens of each region after merging.
        merges: Whether the regions are merged.
    """

    number: int
    shape: tuple[int, ...]
    kept: int
    merges: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens of each region."""
        return prod(self.shape)


class Regions(NamedTuple):
    """Regions within which image tokens merge, for one image size.

    Attributes:
        order: Raster index of the image token at each position; the tokens of a region are consecutive.
        inverse: Position of each raster token.
        groups: Regions in this order; consecutive regions of one shape form a group.
        grid: (rows, columns) of the generated image in tokens, or (frames, rows, columns) of a video.
        picked: Raster indices of the destinations in the generated image, for plots, from the first sample in the
            model's last group of blocks. None before the first plan.
    """

    order: Int[Tensor, "image"]
    inverse: Int[Tensor, "image"]
    groups: tuple[Group, ...]
    grid: Grid
    picked: Int[Tensor, "picked"] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each group."""
        return tuple(group.number * group.tokens for group in self.groups)

    @property
    def kept(self) -> int:
        """Number of tokens after merging."""
        return sum(group.number * group.kept for group in self.groups)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """No tables: merged tokens attend to all merged tokens."""
        return ()

    @property
    @persistent
    def tile_maps(self) -> tuple[Int[Tensor, "*grid"], ...]:
        """Region of every token of the generated image, for plots."""
        number = torch.arange(sum(group.number for group in self.groups))
        sizes = torch.tensor([group.tokens for group in self.groups for _ in range(group.number)])
        regions = number.repeat_interleave(sizes)[self.inverse.cpu()]
        return (regions[: prod(self.grid)].view(self.grid),)

    @persistent
    def merged(self, table: BlockTable, text: int) -> BlockTable:
        """Block table of the merged tokens: the same blocks with fewer tokens each.

        Args:
            table: Block table over [text | image in this order].
            text: Number of text tokens.

        Raises:
            ValueError: If the tokens of a region have different keys or different readers.
        """
        self._check_borders(table, text)
        kept = [torch.ones(text, dtype=torch.long)]
        for group in self.groups:
            region = torch.ones(group.tokens, dtype=torch.long)
            if group.merges:
                region[0], region[1:] = group.kept, 0
            kept.append(region.repeat(group.number))
        starts = torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(kept).cumsum(0)]).int()
        queries, keys = (starts[x.long().cpu()].to(x.device) for x in table[:2])
        return BlockTable(queries, keys, *table[2:])

    def _check_borders(self, table: BlockTable, text: int) -> None:
        allowed, position = {0, *range(text + 1)}, text
        for group in self.groups:
            step = group.tokens if group.merges else 1
            allowed |= set(range(position, position + group.number * group.tokens, step))
            position += group.number * group.tokens
        if across := [border for border in table.borders() if border < position and border not in allowed]:
            raise ValueError(f"a merge region crosses a border of the sparse attention tiles, at tokens {across}")

    def positions_of(self, chosen: Sequence[Tensor]) -> Int[Tensor, "batch merged"]:
        """Positions in `order` of tokens numbered within their regions [batch, number, kept]."""
        first, positions = 0, list[Tensor]()
        for group, picks in zip(self.groups, chosen, strict=True):
            starts = first + group.tokens * torch.arange(group.number, device=picks.device)
            positions.append((picks + starts[:, None]).flatten(1))
            first += group.number * group.tokens
        return torch.cat(positions, 1)


class Merge(NamedTuple):
    """A merge of image tokens into destinations by weight matrices, one matrix for each region.

    Tokens are in the order of their regions.

    Attributes:
        lengths: Number of tokens of each group of regions.
        gather: Merge weights of each group [batch, number, kept, tokens]; rows sum to 1. None without merging.
        spread: Unmerge weights of each group [batch, number, kept, tokens]; columns sum to 1.
        chosen: Destinations of each group, numbered within their region [batch, number, kept], ascending.
        positions: Positions of the destinations in the order of the tokens [batch, merged].
    """

    lengths: tuple[int, ...]
    gather: tuple[Tensor | None, ...]
    spread: tuple[Tensor | None, ...]
    chosen: tuple[Tensor, ...]
    positions: Int[Tensor, "batch merged"]

    def merge(
        self, x: Float[Tensor, "batch all dim"], text: int = 0, order: Int[Tensor, "all"] | None = None
    ) -> Float[Tensor, "batch fewer dim"]:
        """Merged tokens: each destination is a weighted mean of the tokens of its region.

        Args:
            x: Text tokens, which stay unchanged, followed by image tokens.
            text: Number of text tokens.
            order: Permutation of x into the order of the regions. None: x is in this order.
        """
        return _multiply(self.gather, x, self.lengths, text, order)

    def unmerge(self, y: Float[Tensor, "batch fewer dim"], text: int = 0) -> Float[Tensor, "batch all dim"]:
        """Unmerged tokens: each is the weighted sum of its destinations."""
        lengths = [chosen.shape[1] * chosen.shape[2] for chosen in self.chosen]
        return _multiply([weights if weights is None else weights.mT for weights in self.spread], y, lengths, text)

    def update(
        self: "AnyMerge",
        x: Float[Tensor, "batch all dim"],
        before: Float[Tensor, "batch fewer dim"],
        after: Float[Tensor, "batch fewer dim"],
        order: Int[Tensor, "all"] | None = None,
    ) -> Float[Tensor, "batch all dim"]:
        """All tokens after layers that ran on merged tokens: ``x + unmerge(after - before)``.

        Args:
            x: Tokens before merging.
            before: Merged tokens before the layers.
            after: Merged tokens after the layers.
            order: Permutation of x into the order of the regions. None: x is in this order.
        """
        weights = [weights.mT for weights in self.spread if weights is not None]
        if weights and len(weights) == len(self.spread):
            return region_update(weights, x, before, after, order)
        return add_tokens(x, self.unmerge(after - before), order)

    def rope(self: "AnyMerge", rows: Shaped[Tensor, "samples image dim"]) -> Shaped[Tensor, "batch merged dim"]:
        """Rows of the destinations, as of a rotary embedding, for the merged tokens.

        `rows` has one sample if all samples share them.
        """
        return rows.take_along_dim(self.positions[..., None], 1)


class IndexMerge(NamedTuple):
    """A merge in which every token belongs to exactly one destination.

    Attributes:
        positions: Positions of the destinations [batch, merged].
        dst_index: Number of the destination of each token [batch, image].
        pruned: Drop the tokens that are not destinations. Otherwise a destination becomes the mean of its tokens.
        longest: Scale each mean to the norm of its longest token (MLERP of ToFu).
    """

    positions: Int[Tensor, "batch merged"]
    dst_index: Int[Tensor, "batch image"]
    pruned: bool = False
    longest: bool = False

    @property
    def chosen(self) -> tuple[Tensor, ...]:
        """Empty: destinations are not reused by later plans."""
        return ()

    @property
    def spread(self) -> tuple[Tensor, ...]:
        """Empty: there are no weight matrices."""
        return ()

    def merge(
        self, x: Float[Tensor, "batch all dim"], text: int = 0, order: Int[Tensor, "all"] | None = None
    ) -> Float[Tensor, "batch fewer dim"]:
        """Merged tokens; see `Merge.merge`."""
        x = x if order is None else x.index_select(1, order)
        if text:
            return torch.cat([x[:, :text], self.merge(x[:, text:])], 1)
        if self.pruned:
            return x.take_along_dim(self.positions[..., None], 1)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        index = self.dst_index[..., None].expand_as(x)
        mean = exact.new_zeros(len(x), self.positions.shape[1], x.shape[2])
        mean = mean.scatter_reduce(1, index, exact, "mean", include_self=False)
        if self.longest:
            lengths = exact.norm(dim=-1)
            longest = lengths.new_zeros(mean.shape[:2]).scatter_reduce(1, index[..., 0], lengths, "amax")
            mean = torch.nn.functional.normalize(mean, dim=-1) * longest[..., None]
        return mean.to(x.dtype)

    def unmerge(self, y: Float[Tensor, "batch fewer dim"], text: int = 0) -> Float[Tensor, "batch all dim"]:
        """Unmerged tokens: each is a copy of its destination."""
        if text:
            return torch.cat([y[:, :text], self.unmerge(y[:, text:])], 1)
        return y.take_along_dim(self.dst_index[..., None], 1)

    update, rope = Merge.update, Merge.rope


AnyMerge = Merge | IndexMerge
"""Both have `merge`, `unmerge`, `update` and `rope`."""


def _multiply(
    weights: Sequence[Tensor | None], x: Tensor, lengths: Sequence[int], text: int, order: Tensor | None = None
) -> Tensor:
    """Text tokens, followed by the products of each group of regions with its matrices."""
    if len(weights) == 1 and weights[0] is not None:
        return region_matmul(weights[0], x, text, order)
    if order is None:
        parts = [(part, None) for part in x.split([text, *lengths], 1)]
    else:
        parts = [(x, rows) for rows in order.split([text, *lengths])]
    return torch.cat([_product(w, *part) for w, part in zip([None, *weights], parts, strict=True)], 1)


def _product(weights: Tensor | None, x: Tensor, rows: Tensor | None) -> Tensor:
    if weights is None:
        return x if rows is None else x[:, rows]
    return region_matmul(weights, x, 0, rows)


def merge_adjacent(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Join adjacent equal groups."""
    return tuple(group._replace(number=len(list(same))) for group, same in groupby(groups))


_MERGED: WeakTensorCache[tuple[Tensor, Tensor]] = WeakTensorCache()


def merged_pattern(table: Pattern, regions: Regions, text: int) -> Pattern:
    """Pattern of sparse attention among merged tokens."""
    if isinstance(table, LogLinear):
        return table.merged(regions.kept)
    queries, keys = _MERGED.get([*table], (regions.groups, text), lambda: regions.merged(table, text)[:2])
    return BlockTable(queries, keys, *table[2:])  # the cache must not hold its key, the table
