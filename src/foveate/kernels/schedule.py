"""What a kernel does for a block table: tiles of rows, longest first, and the columns that each goes through."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.block_table import BlockTable

__all__ = ["Schedule", "schedule"]

Run = tuple[int, int]  # first token, and the one behind the last


class Schedule(NamedTuple):
    """One pass over a table, for kernels: int32 tensors.

    Attributes:
        tiles: [tiles, 5]: of each tile of rows the first token, the token behind its last, its first full step, its
            first short step, and the step behind its last. Longest first.
        steps: [steps, 2]: the first token of a run of columns, and the token behind its last.
        long: The first so many tiles take far longer than the rest: they come first in every head.
    """

    tiles: Tensor
    steps: Tensor
    long: int


def schedule(table: BlockTable, *, rows: int, step: int, device: torch.device) -> Schedule:
    """Cut a table into tiles of at most `rows` query tokens that share one list, and the lists into steps of keys.

    Args:
        table: Who reads what; its transpose makes tiles of keys, and steps of the queries that read them.
        rows: Tokens of a tile at most.
        step: Tokens of a full step. What is left of a run is cut into short steps, half as long at most.
        device: Where the kernel will run.
    """
    tiles: list[tuple[int, int, int, int, int]] = []
    steps: list[Run] = []
    known: dict[tuple[Run, ...], tuple[int, int, int]] = {}
    for (first, end), columns in _merged_rows(table):
        if columns not in known:
            full, short = _cut(columns, step)
            known[columns] = len(steps), len(steps) + len(full), len(steps) + len(full) + len(short)
            steps += full + short
        tiles += [(row, min(row + rows, end), *known[columns]) for row in range(first, end, rows)]
    tiles.sort(key=lambda tile: tile[2] - tile[4])
    lengths = [tile[4] - tile[2] for tile in tiles]
    long = sum(length > 2 * lengths[len(lengths) // 2] for length in lengths)
    return Schedule(_int32(tiles, 5, device), _int32(steps, 2, device), long)


def _merged_rows(table: BlockTable) -> list[tuple[Run, tuple[Run, ...]]]:
    """Runs of query tokens that read the same keys, and those."""
    keys = list(pairwise(table.key_starts.tolist()))
    merged: list[tuple[Run, tuple[Run, ...]]] = []
    for (first, end), blocks in zip(pairwise(table.query_starts.tolist()), table.lists(), strict=True):
        if first == end:
            continue
        columns = _merged(keys[block] for block in blocks)
        if merged and merged[-1][1] == columns:
            first = merged.pop()[0][0]
        merged.append(((first, end), columns))
    return merged


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Adjacent runs as one, empty ones left out."""
    merged: list[Run] = []
    for first, end in runs:
        if first == end:
            continue
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, end))
    return tuple(merged)


def _cut(runs: Iterable[Run], step: int) -> tuple[list[Run], list[Run]]:
    """Full steps, and short ones."""
    full: list[Run] = []
    short: list[Run] = []
    for first, end in runs:
        rest = end - (end - first) % step
        full += [(start, start + step) for start in range(first, rest, step)]
        short += [(start, min(start + step // 2, end)) for start in range(rest, end, step // 2)]
    return full, short


def _int32(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, width).to(device)
