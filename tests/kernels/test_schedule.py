"""Laws of schedules: they cover every pair of the table once, and the longest tiles come first."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_table

from foveate import HilbertA
from foveate.kernels.block.schedule import OVERHEAD, partition, schedule, take_turns


def covered(run, rows, columns):
    """Number of times that the schedule covers each pair of tokens."""
    count = torch.zeros(rows, columns, dtype=torch.long)
    for first, end, full, _, done in run.tiles.tolist():
        for left, right in run.steps[full:done].tolist():
            count[first:end, left:right] += 1
    return count


@given(
    seed=st.integers(0, 2**31), queries=st.integers(1, 300), keys=st.integers(1, 300), block=st.integers(1, 90),
    rows=st.sampled_from([16, 64, 128]), step=st.sampled_from([16, 64, 128]), transposed=st.booleans(),
    aligned=st.sampled_from([1, 4]),
)  # fmt: skip
def test_every_pair_of_the_table_is_covered_once(seed, queries, keys, block, rows, step, transposed, aligned):
    table = random_table(seed, (queries,), (keys,), block=block)
    table = table.transpose() if transposed else table
    run = schedule(table, rows=rows, step=step, aligned=aligned, device=torch.device("cpu"))
    assert torch.equal(covered(run, table.query_tokens, table.key_tokens), table.to_dense().long())
    tiles = run.tiles
    assert tiles[:, :2].sort(0).values.flatten()[1:-1].view(-1, 2).diff().eq(0).all()  # one tile per row
    assert (tiles[:, 1] - tiles[:, 0] <= rows).all()
    for _, _, full, short, done in tiles.tolist():
        starts, ends = run.steps.T
        assert (starts[full:short] % aligned == 0).all()
        lengths = ends - starts // aligned * aligned
        assert (lengths[full:short] == step).all()
        assert (lengths[short:done] <= step // 2).all()


def test_the_grid_of_2048_px_needs_no_short_steps_and_starts_with_the_prefix():
    table = HilbertA(tiles=16, slide="curve").plan(((128, 128),), 512).tables[1]
    run = schedule(table, rows=128, step=128, device=torch.device("cpu"))
    assert (run.steps.diff(dim=1) == 128).all()
    assert run.long == 1536 // 128
    assert (run.tiles[: run.long, 1] <= 1536).all()
    lengths = run.tiles[:, 4] - run.tiles[:, 2]
    assert (lengths.diff() <= 0).all()


def test_blocks_that_read_the_same_keys_share_tiles():
    table = HilbertA(tiles=1).plan(((16, 16),), 77).tables[0].padded(20, 20, 500)
    run = schedule(table, rows=128, step=128, device=torch.device("cpu"))
    assert run.tiles[:, :2].tolist() == [[0, 128], [128, 256], [256, 333]]


@given(seed=st.integers(0, 2**31), samples=st.integers(1, 9), programs=st.integers(1, 40))
def test_every_tile_with_steps_is_assigned_once_and_loads_are_balanced(seed, samples, programs):
    table = random_table(seed, (700,), (900,))
    run = schedule(table, rows=128, step=64, short=64, device=torch.device("cpu"))
    work, bounds = partition(run, samples, programs)[4:]
    costs = run.tiles[:, 4] - run.tiles[:, 2]
    busy = costs.nonzero().flatten().tolist()
    assert sorted(map(tuple, work.tolist())) == [(tile, sample) for tile in busy for sample in range(samples)]
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(work), programs + 1)
    loads = [
        sum(costs[tile].item() + OVERHEAD for tile, _ in work[a:b].tolist())
        for a, b in bounds.flatten().unfold(0, 2, 1)
    ]
    assert max(loads) - min(loads) <= costs.max().item() + OVERHEAD


def programs_of(plan):
    """The items of each program."""
    return [plan.items[a:b].tolist() for a, b in plan.bounds.flatten().unfold(0, 2, 1).tolist()]


TURNS = given(
    seed=st.integers(0, 2**31), queries=st.integers(1, 300), keys=st.integers(1, 300), block=st.integers(1, 90),
    samples=st.integers(1, 4), programs=st.integers(1, 12), step=st.sampled_from([16, 64, 128]),
    aligned=st.sampled_from([1, 4]),
)  # fmt: skip


def turns_of(seed, queries, keys, block, samples, programs, step, aligned):
    table = random_table(seed, (queries,), (keys,), block=block)
    sizes = {"rows": 64, "step": step, "samples": samples, "programs": programs, "aligned": aligned}
    return table, take_turns(table, **sizes, device=torch.device("cpu"))


@TURNS
def test_turns_cover_every_pair_of_every_sample_once(**sizes):
    table, plan = turns_of(**sizes)
    starts, ends = plan.cells.T.tolist()
    assert (starts[0], ends[-1], starts[1:]) == (0, table.key_tokens, ends[:-1])
    assert all(
        end - start // sizes["aligned"] * sizes["aligned"] <= sizes["step"] for start, end in plan.cells.tolist()
    )
    count = torch.zeros(sizes["samples"], table.query_tokens, table.key_tokens, dtype=torch.long)
    for tile, sample, first, done in plan.items.tolist():
        row, row_end = plan.tiles[tile].tolist()
        for base, span, place, _ in plan.visits[first:done].tolist():
            left, right = base + span % 256, base + span // 256
            assert place // len(starts) == sample
            assert starts[place % len(starts)] <= left < right <= ends[place % len(starts)]
            assert base == starts[place % len(starts)] // sizes["aligned"] * sizes["aligned"]
            count[sample, row:row_end, left:right] += 1
    assert torch.equal(count, table.to_dense().long().expand_as(count))


@TURNS
def test_ranks_follow_the_simulated_time_and_programs_that_wait_for_their_turns_end(**sizes):
    _, plan = turns_of(**sizes)
    order = {}
    for program, items in enumerate(programs_of(plan)):
        time = 0.0
        for _, _, first, done in items:
            for visit, (_, _, place, rank) in enumerate(plan.visits[first:done].tolist()):
                order.setdefault(place, []).append((time + visit, program, rank))
            time += done - first + OVERHEAD
    for visits in order.values():
        assert [rank for *_, rank in sorted(visits)] == list(range(len(visits)))
    # programs that run at any speed
    waiting = [
        [tuple(visit[2:]) for _, _, a, b in items for visit in plan.visits[a:b].tolist()]
        for items in programs_of(plan)
    ]
    ended = dict.fromkeys(order, 0)
    chance = random.Random(sizes["seed"])
    while any(waiting):
        ready = [visits for visits in waiting if visits and ended[visits[0][0]] == visits[0][1]]
        assert ready, "deadlock"
        ended[chance.choice(ready).pop(0)[0]] += 1


def test_tiles_of_a_grid_visit_a_cell_some_steps_apart():
    table = HilbertA(tiles=16, slide="curve", align=128).plan(((128, 128),), 512, block=128).tables[1].transpose()
    plan = take_turns(table, rows=128, step=64, aligned=4, samples=24, programs=132, device=torch.device("cpu"))
    assert plan.whole
    begin = torch.zeros(len(plan.visits) - 1)
    for items in programs_of(plan):
        time = 0.0
        for _, _, first, done in items:
            begin[first:done] = time + torch.arange(done - first)
            time += done - first + OVERHEAD
    _, _, place, rank = plan.visits[:-1].T.long()
    order = (place * len(rank) + rank).argsort()
    pauses = begin[order].diff()[place[order].diff() == 0]
    assert (pauses >= 0).all()
    assert (pauses < 1).float().mean() < 0.25
