"""What queries read: the blocks of tokens that their block picked, and shared keys.

*Shared keys* are the means of coarse levels, the finest first, and behind them keys that everyone sees. A *run* of up
to 256 queries has the same ones in sight; blocks of tokens are read by one block of queries each. Both are gathered
from tables for a few runs at a time, so that memory stays linear in the number of tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops.hierarchical_pooling import children

__all__ = ["Layout", "Read", "Table", "layout_of", "pieces", "tables_of"]

LONGEST_RUN = 256  # whole blocks of any size, and never more than one node of level 2
AT_ONCE = 2**20  # entries of what is gathered and scored in one piece, unless a single block takes more


class Layout(NamedTuple):
    """How the queries of every head are cut, and the sizes of what they read.

    Attributes:
        block: Tokens of a block.
        blocks: How many blocks there are.
        means: How many shared keys are means, for each level that has any.
        shared: How many shared keys there are.
        run: Queries of a run.
        runs: How many there are in a head.
        heads: In the whole batch.
        at_once: How many runs to take in one piece.
    """

    block: int
    blocks: int
    means: tuple[int, ...]
    shared: int
    run: int
    runs: int
    heads: int
    at_once: int

    def runs_of(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, dim] -> [runs of all heads, queries, dim]."""
        padded = pad(x, (0, 0, 0, self.runs * self.run - x.shape[2]))
        return padded.reshape(-1, self.run, x.shape[3])


class Table(NamedTuple):
    """Rows of as many keys each. Behind those of every head is one that nobody sees: -1 in a list points there.

    Attributes:
        k: [rows, keys, dim].
        v: Values.
        bias: [rows, keys], added to scores.
        rows: Of one head.
    """

    k: Tensor
    v: Tensor
    bias: Tensor
    rows: int

    def read(self, numbers: Tensor, heads: Tensor) -> "Read":
        """The rows of these numbers [lists, entries], each list in its head."""
        rows = numbers.where(numbers >= 0, self.rows - 1) + heads[:, None] * self.rows
        k, v = (x.flatten(1).index_select(0, rows.flatten()).view(len(rows), -1, x.shape[2]) for x in (self.k, self.v))
        bias = self.bias[rows].view(len(rows), 1, -1)
        return Read(rows, k.to(bias.dtype), v.to(bias.dtype), bias)


class Read(NamedTuple):
    """What lists of queries read: a list is read by a run of queries, or by a block of them.

    Attributes:
        rows: Of the table [lists, entries].
        k: [lists, keys, dim].
        v: Values.
        bias: [lists, 1 or queries, keys].
    """

    rows: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor

    def cut(self, x: Tensor) -> Tensor:
        """[runs, queries, dim] -> [lists, queries of a list, dim]."""
        return x.reshape(len(self.rows), -1, x.shape[2])

    def scores(self, q: Tensor, scale: float) -> Tensor:
        """Of the queries [runs, queries, dim] of each list with its keys."""
        q = self.cut(q)
        return torch.baddbmm(self.bias.expand(-1, q.shape[1], -1), q, self.k.mT, alpha=scale)


def layout_of(q: Tensor, shared_k: Tensor, lists: list[Tensor], block: int, enriched: int) -> Layout:
    """Runs as long as they can be for what a piece may hold, and as many of them at once."""
    batch, heads, tokens, dim = q.shape
    means = tuple(x.shape[2] for x in lists[:enriched])
    picked = lists[0].shape[3] * block
    in_sight = [x.shape[3] * block for x in lists[1 : enriched + 1]] + list(means[len(lists) - 1 :])
    seen = sum(in_sight) + shared_k.shape[2] - sum(means)

    def entries(run: int) -> int:
        return run // block * picked * dim + seen * dim + run * (picked + seen)

    run = block
    while run < min(tokens, LONGEST_RUN) and entries(2 * run) <= AT_ONCE:
        run *= 2
    at_once = max(1, AT_ONCE // entries(run))
    return Layout(block, lists[0].shape[2], means, shared_k.shape[2], run, -(-tokens // run), batch * heads, at_once)


def tables_of(
    k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, shared_bias: Tensor, real: Tensor | None, layout: Layout
) -> tuple[Table, Table]:
    """Rows of one block of tokens each, and rows of one shared key each."""
    real = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if real is None else real
    bias = torch.zeros(real.shape, dtype=shared_bias.dtype, device=k.device).masked_fill_(~real, -torch.inf)
    blocks = _table(k, v, bias, layout.blocks + 1, layout.block)
    return blocks, _table(shared_k, shared_v, shared_bias, layout.shared + 1, 1)


def _table(k: Tensor, v: Tensor, bias: Tensor, rows: int, keys: int) -> Table:
    room = rows * keys - k.shape[2]
    bias = pad(bias, (0, room), value=-torch.inf)[:, None].expand(*k.shape[:2], -1)
    k, v = (pad(x, (0, 0, 0, room)).reshape(-1, keys, x.shape[3]) for x in (k, v))
    return Table(k, v, bias.reshape(-1, keys), rows)


def pieces(
    tables: tuple[Table, Table], lists: list[Tensor], layout: Layout, exclude: bool
) -> Iterator[tuple[slice, tuple[Read, Read]]]:
    """Pieces of the runs of all heads in turn, and what they read: blocks of tokens, and shared keys."""
    numbers = torch.arange(layout.heads * layout.runs, device=lists[0].device)
    starts = torch.arange(0, layout.run, layout.block, device=numbers.device)
    for start in range(0, len(numbers), layout.at_once):
        piece = slice(start, start + layout.at_once)
        heads, first = numbers[piece] // layout.runs, numbers[piece] % layout.runs * layout.run
        # blocks behind the last one are padding of the last run
        blocks = ((first[:, None] + starts) // layout.block).clamp(max=layout.blocks - 1)
        picks = _of(lists[0], heads[:, None], blocks).flatten(0, 1)
        seen = _in_sight(lists, heads, first, layout)
        reads = tables[0].read(picks, heads.repeat_interleave(len(starts))), tables[1].read(seen, heads)
        if exclude and layout.means:
            hidden = _picked_means(lists, heads, blocks, layout, seen).repeat_interleave(layout.block, 1)
            reads = reads[0], reads[1]._replace(bias=reads[1].bias.masked_fill(hidden, -torch.inf))
        yield piece, reads


def _of(lists: Tensor, heads: Tensor, nodes: Tensor) -> Tensor:
    """The lists [..., picks] of these nodes in these heads, counted through the batch."""
    return lists.flatten(0, 2)[heads * lists.shape[2] + nodes].long()


def _in_sight(lists: list[Tensor], heads: Tensor, first: Tensor, layout: Layout) -> Tensor:
    """Numbers of the shared keys [runs, seen] of the runs that begin with these tokens; -1 where there is none."""
    seen, start = [], 0
    for level, nodes in enumerate(layout.means, start=1):
        if level < len(lists):
            found = children(_of(lists[level], heads, first // layout.block ** (level + 1)), nodes, layout.block)
            seen.append(found.where(found < 0, found + start))
            start += nodes
    # the top and what is behind it are in sight of all
    seen = torch.cat([*seen, torch.arange(start, layout.shared, device=heads.device).expand(len(heads), -1)], 1)
    return seen if seen.shape[1] else heads.new_full((len(heads), 1), -1)


def _picked_means(lists: list[Tensor], heads: Tensor, blocks: Tensor, layout: Layout, seen: Tensor) -> Tensor:
    """[runs, blocks, seen]: which means in sight are of nodes that an ancestor of the block picked, or it itself."""
    picked, start = [], 0
    for level, nodes in enumerate(layout.means):
        picks = _of(lists[level], heads[:, None], blocks // layout.block**level)
        picked.append(picks.where(picks < 0, picks + start))
        start += nodes
    picked = torch.cat(picked, -1)
    picked = picked.where(picked >= 0, layout.shared).sort(-1).values
    seen = seen[:, None].expand(-1, blocks.shape[1], -1).contiguous()
    places = torch.searchsorted(picked, seen).clamp(max=picked.shape[2] - 1)
    return picked.take_along_dim(places, 2) == seen
