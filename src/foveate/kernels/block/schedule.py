"""Schedules of kernels over a block table: tiles of rows, the longest first, and the columns each tile reads."""

from collections.abc import Iterable, Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.block_table import BlockTable

__all__ = ["Schedule", "partition", "schedule"]

Run = tuple[int, int]  # [first token, end)
OVERHEAD = 1.0  # cost of starting and ending a tile, in steps


class Schedule(NamedTuple):
    """One pass of a kernel over a table; int32 tensors.

    Attributes:
        tiles: [tiles, 5], the longest first: first row, end row, first full step, first short step, end step.
        steps: [steps, 2]: first column and end column of each step.
        long: Number of leading tiles that take much longer than the rest. Kernels start them first, for all heads.
        whole: Whether every tile has steps. Kernels with a fixed number of programs skip tiles without steps.
        items: [items, 2]: tile and sample (batch * heads + head) of each piece of work, grouped by program; None for
            one program per tile and sample.
        bounds: [programs + 1]: program i has ``items[bounds[i] : bounds[i + 1]]``.
    """

    tiles: Tensor
    steps: Tensor
    long: int = 0
    whole: bool = True
    items: Tensor | None = None
    bounds: Tensor | None = None


def schedule(
    table: BlockTable, *, rows: int, step: int, device: torch.device, short: int = 0, aligned: int = 1
) -> Schedule:
    """Cut a table into tiles of at most `rows` query tokens that read the same keys, and steps through these keys.

    Args:
        table: Key blocks that each query block reads. The transposed table gives tiles of keys and steps of queries.
        rows: Largest number of tokens in a tile.
        step: Number of tokens in a full step.
        device: Device of the returned tensors.
        short: Largest number of tokens in a short step, which covers the remainder of a run; 0 is half a full step.
        aligned: Full steps begin at multiples of this number. A short step counts its tokens from the last multiple.
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
    return Schedule(_int32(tiles, 5, device), _int32(steps, 2, device), long, all(lengths))


def partition(plan: Schedule, samples: int, programs: int) -> Schedule:
    """Distribute the tiles of all samples greedily: the longest tile next, to the first free program.

    Tiles without steps are left out.

    Args:
        plan: The schedule.
        samples: Batch size times number of heads.
        programs: Number of programs.
    """
    costs = (plan.tiles[:, 4] - plan.tiles[:, 2]).tolist()
    tiles = range(sum(cost > 0 for cost in costs))
    order = [(tile, sample) for sample in range(samples) for tile in tiles[: plan.long]]
    order += [(tile, sample) for sample in range(samples) for tile in tiles[plan.long :]]
    free = [(0.0, program) for program in range(programs)]
    assigned: list[list[tuple[int, int]]] = [[] for _ in free]
    for tile, sample in order:
        busy, program = free[0]
        assigned[program].append((tile, sample))
        heapreplace(free, (busy + costs[tile] + OVERHEAD, program))
    device = plan.tiles.device
    bounds = [(0,), *((end,) for end in accumulate(map(len, assigned)))]
    items = _int32([item for items in assigned for item in items], 2, device)
    return plan._replace(items=items, bounds=_int32(bounds, 1, device))


def _merged_rows(table: BlockTable) -> list[tuple[Run, tuple[Run, ...]]]:
    """Maximal runs of query tokens that read the same keys, each with its runs of keys."""
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
    """Drop empty runs and join adjacent runs."""
    merged: list[Run] = []
    for first, end in runs:
        if first == end:
            continue
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, end))
    return tuple(merged)


def _cut(runs: Iterable[Run], step: int, short: int, aligned: int) -> tuple[list[Run], list[Run]]:
    """Full and short steps that cover runs of columns."""
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
