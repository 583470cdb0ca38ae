"""Laws of schedules: they cover every pair of the table once, and the longest tiles come first."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_table

from foveate import HilbertA
from foveate.kernels.block.schedule import OVERHEAD, partition, schedule


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
