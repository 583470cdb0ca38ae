"""Which blocks every block of queries picked, level by level: what `select_blocks` returns."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Readers", "Selection"]


class Readers(NamedTuple):
    """For each node of a level the nodes that picked it, in compressed rows.

    Attributes:
        offsets: [batch, heads, nodes + 1], int32: node j was picked by ``rows[offsets[j] : offsets[j + 1]]``.
        rows: [batch, heads, entries], int32: numbers of nodes, ascending for each j; -1 behind the last offset.
    """

    offsets: Tensor
    rows: Tensor


class Selection(NamedTuple):
    """The picks of a sequence, for use in one call of `log_linear_attention` or in several.

    Attributes:
        lists: For each level, the finest first, which nodes each node picked: [batch, heads, nodes, picks], int32,
            ascending, -1 past the end. ``lists[0]`` are the blocks of tokens that each block of queries reads.
        counts: For each level how many real tokens each node stands for: [batch, nodes], int32; one row for the whole
            batch where no token is padding.
        tokens: Length of the sequence.
        block_size: Tokens of a block, and children of a node.
        top_k: How many nodes each was to pick.
        full: Whether each is known to have as many, or as many as there are: where no token was padding.
    """

    lists: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    tokens: int
    block_size: int
    top_k: int
    full: bool = False

    @property
    def levels(self) -> int:
        """How many pooled levels there are."""
        return len(self.lists)

    def transpose(self, level: int = 1) -> Readers:
        """Who picked each node of a level: what a backward pass by keys walks through.

        Examples:
            >>> picks = torch.tensor([[1, 2], [2, 3], [0, 3], [1, 3]], dtype=torch.int32)
            >>> readers = Selection((picks[None, None],), (), 64, 16, 2).transpose()
            >>> readers.offsets.flatten().tolist(), readers.rows.flatten().tolist()
            ([0, 1, 3, 5, 8], [2, 0, 3, 0, 1, 1, 2, 3])
        """
        lists = self.lists[level - 1]
        nodes, top_k = lists.shape[2:]
        keys = lists.flatten(2).long()
        keys, order = keys.where(keys >= 0, nodes).sort(dim=-1, stable=True)
        rows = (order // top_k).where(keys < nodes, -1)
        starts = torch.arange(nodes + 1, device=keys.device).expand(*keys.shape[:2], -1).contiguous()
        return Readers(torch.searchsorted(keys, starts).int(), rows.int())
