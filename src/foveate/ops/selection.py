"""The result of `select_blocks`: the blocks that each block of queries picked, level by level."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Readers", "Selection"]


class Readers(NamedTuple):
    """The nodes that picked each node of a level, in compressed rows.

    Attributes:
        offsets: Int32 [batch, heads, nodes + 1]: node j was picked by ``rows[offsets[j] : offsets[j + 1]]``.
        rows: Int32 [batch, heads, entries]: indices of nodes, ascending for each j; -1 after the last offset.
    """

    offsets: Tensor
    rows: Tensor


class Selection(NamedTuple):
    """The nodes that each node of a sequence picked, for one or more calls of `log_linear_attention`.

    Attributes:
        lists: Picks for each level, the finest first: int32 [batch, heads, nodes, picks], ascending, filled up with
            -1. ``lists[0]`` holds the blocks of tokens that each block of queries reads.
        counts: Number of real tokens in each node, for each level: int32 [batch, nodes], or one row for the whole
            batch if no token is padding.
        tokens: Length of the sequence.
        block_size: Tokens of a block, and children of a node.
        top_k: Number of nodes that each node was asked to pick.
        full: Whether lists are known to have no -1, because no token was padding.
    """

    lists: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    tokens: int
    block_size: int
    top_k: int
    full: bool = False

    @property
    def levels(self) -> int:
        """Number of pooled levels."""
        return len(self.lists)

    def transpose(self, level: int = 1) -> Readers:
        """The nodes that picked each node of a level, as a backward pass over keys needs them.

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
