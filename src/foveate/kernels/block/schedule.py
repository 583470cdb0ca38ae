"""What a kernel does for a block table: tiles of rows, longest first, and the columns that each goes through."""

from collections.abc import Iterable, Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.block_table import BlockTable

__all__ = ["Schedule", "Shares", "schedule", "shares"]

Run = tuple[int, int]  # first token, and the one behind the last
OVERHEAD = 1.0  # of starting and ending a tile, in steps


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


class Shares(NamedTuple):
    """Which tiles each program works off, where a program takes many: int32 tensors.

    Attributes:
        work: [work, 2]: tile and sample, program by program.
        bounds: [programs + 1]: program i has ``work[bounds[i] : bounds[i + 1]]``.
    """

    work: Tensor
    bounds: Tensor


def schedule(
    table: BlockTable, *, rows: int, step: int, device: torch.device, short: int = 0, aligned: int = 1
) -> Schedule:
    """Cut a table into tiles of at most `rows` query tokens that share one list, and the lists into steps of keys.

    Args:
        table: Who reads what; its transpose makes tiles of keys, and steps of the queries that read them.
        rows: Tokens of a tile at most.
        step: Tokens of a full step.
        device: Where the kernel will run.
        short: Tokens of a short step at most, into which the rest of a run is cut; half a full step if 0.
        aligned: Full steps begin at multiples of this, and short ones are as short counted from the multiple before.
    """
    tiles: list[tuple[int, int, int, int, int]] = []
    steps: list[Run] = []
    known: dict[tuple[Run, ...], tuple[int, int, int]] = {}
    for (first, end), columns in _merged_rows(table):
        if columns not in known:
            full, rest = _cut(columns, step, short or step // 2, aligned)
            known[columns] = len(steps), len(steps) + len(full), len(steps) + len(full) + len(rest)
            steps += full + rest
        tiles += [(row, min(row + rows, end), *known[columns]) for row in range(first, end, rows)]
    tiles.sort(key=lambda tile: tile[2] - tile[4])
    lengths = [tile[4] - tile[2] for tile in tiles]
    long = sum(length > 2 * lengths[len(lengths) // 2] for length in lengths)
    return Schedule(_int32(tiles, 5, device), _int32(steps, 2, device), long)


def shares(run: Schedule, samples: int, programs: int) -> Shares:
    """Share the tiles of all samples out evenly: the longest first, each to the program that is free first.

    Tiles without steps are left out.

    Args:
        run: The tiles, longest first.
        samples: Batch times heads.
        programs: How many programs there are.
    """
    costs = (run.tiles[:, 4] - run.tiles[:, 2]).tolist()
    tiles = range(sum(cost > 0 for cost in costs))
    order = [(tile, sample) for sample in range(samples) for tile in tiles[: run.long]]
    order += [(tile, sample) for sample in range(samples) for tile in tiles[run.long :]]
    free = [(0.0, program) for program in range(programs)]
    mine: list[list[tuple[int, int]]] = [[] for _ in free]
    for tile, sample in order:
        busy, program = free[0]
        mine[program].append((tile, sample))
        heapreplace(free, (busy + costs[tile] + OVERHEAD, program))
    device = run.tiles.device
    bounds = [(0,), *((end,) for end in accumulate(map(len, mine)))]
    return Shares(_int32([item for items in mine for item in items], 2, device), _int32(bounds, 1, device))


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


def _cut(runs: Iterable[Run], step: int, short: int, aligned: int) -> tuple[list[Run], list[Run]]:
    """Full steps, and short ones."""
    full: list[Run] = []
    rests: list[Run] = []
    for first, end in runs:
        if beyond := first % aligned:
            rests.append((first, min(first - beyond + short, end)))
            first = rests[-1][1]
        rest = end - (end - first) % step
        full += [(start, start + step) for start in range(first, rest, step)]
        rests += [(start, min(start + short, end)) for start in range(rest, end, short)]
    return full, rests


def _int32(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, width).to(device)
