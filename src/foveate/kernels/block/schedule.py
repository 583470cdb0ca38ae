"""Schedules of kernels over a block table: tiles of rows, the longest first, and the columns each tile reads."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops.block_table import BlockTable

__all__ = ["Schedule", "Turns", "partition", "schedule", "take_turns"]

Run = tuple[int, int]  # [first token, end)
OVERHEAD = 1.0  # cost of starting and ending a tile, in steps
APART = 2  # steps between two tiles that add to the same cell


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


class Turns(NamedTuple):
    """Work of persistent programs that add to the same sums, in a fixed order; int32 tensors.

    Columns are cut into cells. A program walks through the cells that its tile of rows reads and adds to the sums of
    each. A visit of a cell must wait until as many visits of the same cell and sample have ended as its rank says.

    Attributes:
        tiles: [tiles, 2]: first row and end row.
        cells: [cells, 2]: first column and end column.
        items: [items, 4]: tile, sample (batch * heads + head), first visit and end visit, grouped by program.
        bounds: [programs + 1]: program i has ``items[bounds[i] : bounds[i + 1]]``.
        visits: [visits + 1, 4]: first column to copy, columns to use after that as ``first + 256 * end``, cell of all
            samples (sample * cells + cell), rank. The last row is zero: kernels read one row ahead.
        whole: Whether every tile has visits. Programs skip tiles without visits.
    """

    tiles: Tensor
    cells: Tensor
    items: Tensor
    bounds: Tensor
    visits: Tensor
    whole: bool


def take_turns(
    table: BlockTable, *, rows: int, step: int, aligned: int, samples: int, programs: int, device: torch.device
) -> Turns:
    """Distribute the tiles of all samples like `partition`, and order the visits of each cell.

    The order is that of a simulation in which each visit takes as long as any other. So programs rarely wait. They
    cannot wait for each other in a circle, as each waits for visits that are earlier in the simulation only. Tiles
    that read the same columns follow each other through these at equal distances, and as many samples are worked on
    at the same time as keep two visits of a cell `APART`.

    Args:
        table: Columns that each row reads.
        rows: Largest number of rows in a tile.
        step: Largest number of columns in a cell, at most 255.
        aligned: Copies begin at multiples of this number.
        samples: Batch size times number of heads.
        programs: Number of programs; all must run at the same time.
        device: Device of the returned tensors.
    """
    merged = _merged_rows(table)
    cells = _cells((run for _, columns in merged for run in columns), table.key_tokens, step, aligned)
    starts = [first for first, _ in cells]
    lists: dict[tuple[Run, ...], tuple[int, int]] = {}  # first and number of its visits
    visits: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int, tuple[Run, ...]]] = []
    for (first, end), columns in merged:
        if columns not in lists:
            begin = len(visits)
            for left, right in columns:
                for cell in range(bisect_right(starts, left) - 1, bisect_left(starts, right)):
                    base = starts[cell] // aligned * aligned
                    inside = max(left, starts[cell]) - base, min(right, cells[cell][1]) - base
                    visits.append((base, inside[0] + 256 * inside[1], cell))
            lists[columns] = begin, len(visits) - begin
        tiles += [(row, min(row + rows, end), columns) for row in range(first, end, rows)]
    tiles.sort(key=lambda tile: -lists[tile[2]][1])
    lengths = [lists[columns][1] for *_, columns in tiles]
    busy = sum(length > 0 for length in lengths)
    typical = lengths[busy // 2] if busy else 1
    long = sum(length > 2 * typical for length in lengths)
    shares, place = Counter(columns for *_, columns in tiles), Counter()
    phases: list[float] = []
    for *_, columns in tiles:
        phases.append(place[columns] * lists[columns][1] / shares[columns])
        place[columns] += 1
    together = -(-APART * programs // typical)
    order = [(tile, sample) for sample in range(samples) for tile in range(long)]
    for sample in range(0, samples, together):
        group = range(sample, min(sample + together, samples))
        order += [(tile, sample) for tile in range(long, busy) for sample in group]
    free = [(0.0, program) for program in range(programs)]
    assigned: list[list[tuple[int, int, int, float]]] = [[] for _ in free]  # tile, sample, first cell in list, time
    for tile, sample in order:
        time, program = free[0]
        assigned[program].append((tile, sample, int(time - phases[tile]) % lengths[tile], time))
        heapreplace(free, (time + lengths[tile] + OVERHEAD, program))
    work = [item for items in assigned for item in items]
    numbers = [(tile, sample, turn, *lists[tiles[tile][2]]) for tile, sample, turn, _ in work]
    tile, sample, turn, begin, length = torch.tensor(numbers, dtype=torch.long).view(-1, 5).T
    ends = length.cumsum(0)
    item = torch.arange(len(work)).repeat_interleave(length)
    age = torch.arange(len(item)) - (ends - length)[item]
    listed = torch.tensor(visits, dtype=torch.long).view(-1, 3)[begin[item] + (turn[item] + age) % length[item]]
    time = torch.tensor([time for *_, time in work], dtype=torch.float64)[item] + age
    listed[:, 2] += sample[item] * len(cells)
    rank = _ranks(listed[:, 2], time)
    return Turns(
        _int32([tile[:2] for tile in tiles], 2, device), _int32(cells, 2, device),
        torch.stack([tile, sample, ends - length, ends], 1).int().to(device),
        _int32([(0,), *((end,) for end in accumulate(map(len, assigned)))], 1, device),
        pad(torch.cat([listed, rank[:, None]], 1), (0, 0, 0, 1)).int().to(device), busy == len(tiles),
    )  # fmt: skip


def _ranks(group: Tensor, time: Tensor) -> Tensor:
    """Number of earlier elements of the same group: [n]. Elements of the same time keep their order."""
    order = time.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    _, counts = group.unique(return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(order).index_put_((order,), torch.arange(len(order)) - first)


def _cells(runs: Iterable[Run], columns: int, step: int, aligned: int) -> list[Run]:
    """Cut columns into cells of at most `step` that end at the ends of runs where they can."""
    borders = sorted({0, columns}.union(*runs))
    cells: list[Run] = []
    first = 0
    while first < columns:
        limit = first // aligned * aligned + step
        i = bisect_right(borders, limit) - 1
        cells.append((first, borders[i] if borders[i] > first else limit))
        first = cells[-1][1]
    return cells


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
