"""Block tables, the data structure of all static patterns: the key blocks that each query block reads.

A *block* is a run of consecutive tokens, usually 64 or 128; it is shorter where text, a tile or the sequence ends.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foveate.utils.cache import persistent

__all__ = ["BlockTable", "block_starts", "block_table"]


class BlockTable(NamedTuple):
    """Key blocks that each query block attends to, in compressed rows.

    All tensors are int32, live on the CPU unless moved, and are never changed in place. A table may have unused space
    after its last block and list entry (see `padded`); a block may be empty.

    Attributes:
        query_starts: Query block i holds the tokens ``query_starts[i] : query_starts[i + 1]``.
        key_starts: Key block i holds the tokens ``key_starts[i] : key_starts[i + 1]``.
        offsets: Query block i reads the key blocks ``keys[offsets[i] : offsets[i + 1]]``.
        keys: Indices of key blocks, ascending within a list.
    """

    query_starts: Int[Tensor, "queries_plus_1"]
    key_starts: Int[Tensor, "keys_plus_1"]
    offsets: Int[Tensor, "queries_plus_1"]
    keys: Int[Tensor, "entries"]

    @property
    def query_tokens(self) -> int:
        """Number of query tokens."""
        return int(self.query_starts[-1])

    @property
    def key_tokens(self) -> int:
        """Number of key tokens."""
        return int(self.key_starts[-1])

    def lists(self) -> list[list[int]]:
        """Key blocks of every query block, as Python lists."""
        keys, offsets = self.keys.tolist(), self.offsets.tolist()
        return [keys[a:b] for a, b in pairwise(offsets)]

    def pairs(self) -> int:
        """Exact number of (query token, key token) pairs."""
        key_lengths = torch.cat([self.key_starts.diff(), self.key_starts.new_zeros(1)]).long()
        used = self.keys[: int(self.offsets[-1])].long()
        summed = torch.cat([key_lengths.new_zeros(1), key_lengths[used].cumsum(0)])
        per_row = summed[self.offsets[1:].long()] - summed[self.offsets[:-1].long()]
        return int((per_row * self.query_starts.diff()).sum())

    def sparsity(self) -> float:
        """Skipped fraction of all query-key pairs: 0 is dense."""
        return 1 - self.pairs() / max(1, self.query_tokens * self.key_tokens)

    def flops(self, heads: int, head_dim: int, *, backward: bool = False) -> int:
        """Floating-point operations of attention over this table for one sample, 2 for each multiply-add.

        The forward pass has two products per pair (q·k and p·v), the backward pass five more.
        """
        return (14 if backward else 4) * self.pairs() * heads * head_dim

    def transpose(self) -> "BlockTable":
        """Table of the query blocks that read each key block, for backward passes over keys."""
        used = int(self.offsets[-1])
        rows = torch.repeat_interleave(
            torch.arange(len(self.offsets) - 1, dtype=torch.int32, device=self.keys.device), self.offsets.diff()
        )
        by_key = self.keys[:used].argsort(stable=True)
        counts = torch.bincount(self.keys[:used], minlength=len(self.key_starts) - 1)
        return BlockTable(self.key_starts, self.query_starts, _cumulative(counts), rows[by_key])

    def borders(self) -> list[int]:
        """Positions of queries and keys where the attention pattern differs from the token before."""
        found: set[int] = set()
        for side in (self, self.transpose()):
            lists, starts = side.lists(), side.query_starts.tolist()
            found |= {starts[i] for i in range(1, len(lists)) if lists[i] != lists[i - 1]}
        return sorted(found)

    def to_dense(self) -> Bool[Tensor, "queries keys"]:
        """Pattern as a mask over tokens. Quadratic in the number of tokens: for tests and plots only."""
        by_token = self.dense_blocks().repeat_interleave(self.query_starts.diff().cpu(), 0)
        return by_token.repeat_interleave(self.key_starts.diff().cpu(), 1)

    def dense_blocks(self) -> Bool[Tensor, "query_blocks key_blocks"]:
        """Pattern as a mask over blocks."""
        blocks = torch.zeros(len(self.offsets) - 1, len(self.key_starts) - 1, dtype=torch.bool)
        for row, keys in zip(blocks, self.lists(), strict=True):
            row[keys] = True
        return blocks

    def padded(self, query_blocks: int, key_blocks: int, entries: int) -> "BlockTable":
        """Pad with empty blocks and unused entries, so that several tables share one shape.

        Compiled code accepts tables of one shape without recompilation.
        """
        return BlockTable(
            _extend(self.query_starts, query_blocks + 1, self.query_starts[-1]),
            _extend(self.key_starts, key_blocks + 1, self.key_starts[-1]),
            _extend(self.offsets, query_blocks + 1, self.offsets[-1]),
            _extend(self.keys, entries, 0),
        )

    @persistent
    def with_first_keys(self, tokens: int) -> "BlockTable":
        """Add `tokens` keys in front, which all queries read. Tables of equal shape stay of equal shape."""
        first = block_starts(tokens)[:-1]
        n = len(first)
        lists = [[*range(n), *(n + key for key in row)] for row in self.lists()]
        table = block_table(lists, self.query_starts, torch.cat([first, tokens + self.key_starts]))
        return table.padded(len(lists), n + len(self.key_starts) - 1, n * len(lists) + len(self.keys))

    def check(self, q: Tensor, k: Tensor) -> None:
        """Check that queries and keys [batch, heads, tokens, head_dim] match the table.

        Raises:
            ValueError: If their numbers of tokens differ from the table's.
        """
        if (self.query_tokens, self.key_tokens) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"the table is for {self.query_tokens} queries and {self.key_tokens} keys, "
                f"but q has {q.shape[2]} tokens and k has {k.shape[2]}"
            )

    def to(self, device: torch.device | str) -> "BlockTable":
        """The table on another device."""
        return BlockTable(*(tensor.to(device) for tensor in self))


@persistent
def block_table(
    lists: Sequence[Iterable[int]],
    query_starts: Int[Tensor, "queries_plus_1"],
    key_starts: Int[Tensor, "keys_plus_1"] | None = None,
) -> BlockTable:
    """Table in which query block i reads the key blocks ``lists[i]``.

    Args:
        lists: Indices of the key blocks that each query block reads, in any order, without repetition. Queries with
            an empty list get zeros.
        query_starts: First token of every query block, followed by the number of tokens, as from `block_starts`.
        key_starts: The same for key blocks; `query_starts` if None.

    Examples:
        >>> starts = block_starts(1000)  # 15 blocks of 64 and one of 40
        >>> neighbours = [range(max(0, i - 1), min(16, i + 2)) for i in range(16)]
        >>> block_table(neighbours, starts).pairs()
        182848

    Raises:
        ValueError: If starts do not ascend from 0, if a list contains a block twice or a block that does not exist,
            or if the number of lists is not the number of query blocks.
    """
    key_starts = query_starts if key_starts is None else key_starts
    for starts in (query_starts, key_starts):
        if len(starts) == 0 or starts[0] != 0 or (starts.diff() < 0).any():
            raise ValueError(f"block starts must ascend from 0 to the number of tokens, not {starts.tolist()[:8]}...")
    if len(lists) != len(query_starts) - 1:
        raise ValueError(f"{len(lists)} lists for {len(query_starts) - 1} query blocks: give one list for each block")
    rows = [torch.as_tensor(sorted(keys), dtype=torch.int32) for keys in lists]
    for i, row in enumerate(rows):
        if len(row) and (row[0] < 0 or row[-1] >= len(key_starts) - 1):
            wrong = row[0] if row[0] < 0 else row[-1]
            raise ValueError(f"query block {i} reads key block {wrong}, but there are {len(key_starts) - 1} of them")
        if (row.diff() == 0).any():
            raise ValueError(f"query block {i} lists a key block twice, which would count it twice: {row.tolist()}")
    counts = torch.tensor([len(row) for row in rows])
    keys = torch.cat([torch.empty(0, dtype=torch.int32), *rows])
    return BlockTable(query_starts.int(), key_starts.int(), _cumulative(counts), keys)


@persistent
def block_starts(*runs: int, block: int = 64) -> Int[Tensor, "blocks_plus_1"]:
    """First token of every block, followed by the number of tokens, for runs of tokens cut into blocks of `block`.

    The last block of a run may be shorter. No block spans two runs, and an empty run has no block.

    Examples:
        >>> block_starts(100, 128).tolist()
        [0, 64, 100, 164, 228]

    Raises:
        ValueError: If a run is negative or `block` is below 1.
    """
    if block < 1 or min(runs, default=0) < 0:
        raise ValueError(f"cannot cut runs of {runs} tokens into blocks of {block}: use runs >= 0 and a block >= 1")
    ends = torch.tensor([0, *runs]).cumsum(0).tolist()
    starts = [start for a, b in pairwise(ends) for start in range(a, b, block)]
    return torch.tensor([*starts, ends[-1]], dtype=torch.int32)


def _cumulative(counts: Int[Tensor, "n"]) -> Int[Tensor, "n_plus_1"]:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _extend(tensor: Int[Tensor, "n"], length: int, value: int | Tensor) -> Int[Tensor, "length"]:
    if length < len(tensor):
        raise ValueError(f"cannot pad {len(tensor)} entries to {length}")
    return torch.cat([tensor, tensor.new_full((length - len(tensor),), int(value))])
