"""Laws of deduplication: no pair above the limit, no example lost, and no needless exchange."""

from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import SubCP
from foveate.methods.deduplicate import deduplicate
from foveate.methods.example_blocks import unit_rows
from foveate.methods.sub_cp import STRATEGIES


def copies(seed, kinds=20, times=3):
    """Random directions, each several times with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(kinds, 6, generator=generator).repeat(times, 1)
    return unit_rows(rows + 1e-3 * torch.randn(rows.shape, generator=generator))


def closest(pool, block):
    return max((float(pool[i] @ pool[j]) for i, j in combinations(block, 2)), default=-1.0)


@given(
    seed=st.integers(0, 2**31), strategy=st.sampled_from(STRATEGIES), order=st.sampled_from(("picked", "central_last"))
)
def test_no_block_of_any_strategy_has_a_pair_above_the_limit(seed, strategy, order):
    pool = copies(seed)
    sub = SubCP(blocks=5, block_size=6, strategy=strategy, order=order, max_similarity=0.99)
    ids = sub.partition(pool).ids
    assert all(closest(pool, block) <= 0.99001 for block in ids)
    assert [len(block) for block in ids] == [6] * 5
    assert len({example for block in ids for example in block}) == 30
    assert sub.partition(pool).ids == ids


@given(seed=st.integers(0, 2**31))
def test_given_examples_are_exchanged_only_between_blocks(seed):
    pool, ids = copies(seed), [*range(5), *range(20, 25), *range(40, 45)]
    blocks = SubCP(blocks=3, block_size=None, strategy="local_coherent", max_similarity=0.99).partition(pool, ids).ids
    assert sorted(example for block in blocks for example in block) == sorted(ids)
    assert all(len({example % 20 for example in block}) == 5 for block in blocks)


@given(seed=st.integers(0, 2**31), strategy=st.sampled_from(STRATEGIES))
def test_blocks_without_similar_pairs_stay_unchanged(seed, strategy):
    pool = torch.randn(30, 5, generator=torch.Generator().manual_seed(seed))
    free, kept = (
        SubCP(blocks=3, block_size=4, strategy=strategy, max_similarity=limit).partition(pool)
        for limit in (None, 0.99)
    )
    if all(closest(free.pool, block) <= 0.99 for block in free.ids):
        assert kept.ids == free.ids


def test_exchanges_keep_the_balance():
    pool, labels = copies(0), [i % 2 for i in range(60)]
    sub = SubCP(blocks=5, block_size=6, balance="equal", max_similarity=0.99)
    ids = sub.partition(pool, labels=labels).ids
    assert all(closest(pool, block) <= 0.99001 for block in ids)
    assert all(sum(labels[i] for i in block) == 3 for block in ids)


@given(seed=st.integers(0, 2**31))
def test_the_most_similar_helpful_example_is_exchanged(seed):
    """Compared with all exchanges of one of the two copies that leave no pair above the limit."""
    pool = unit_rows(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)))
    pool[1] = pool[0]
    blocks, spare = [[0, 1, 2], [3, 4, 5]], [6, 7]
    limit = 0.999

    def exchanged(x, y):
        swap = {x: y, y: x}
        return [[swap.get(i, i) for i in block] for block in blocks]

    got = [part.tolist() for part in deduplicate([torch.tensor(block) for block in blocks], spare, pool, limit)]
    fine = [y for y in range(3, 8) if all(closest(pool, block) <= limit for block in exchanged(1, y))]
    best = max(float((pool[1] @ pool[y] * 1e5).round()) for y in fine)
    assert got in [exchanged(1, y) for y in fine if float((pool[1] @ pool[y] * 1e5).round()) == best]


@pytest.mark.usefixtures("as_a_user")
def test_pairs_that_cannot_be_separated_are_counted_in_the_error():
    sub = SubCP(blocks=2, block_size=2, max_similarity=0.9)
    with pytest.raises(ValueError, match=r"of 0\.9 cannot be met: .* no exchange separates: 1; use more blocks"):
        sub.partition([[1, 0], [1, 0], [1, 0], [0, 1.0]])
    for limit in (0.0, 1.0, -0.5, 98):
        with pytest.raises(ValueError, match="must be a cosine between 0 and 1, not"):
            SubCP(max_similarity=limit)


def test_four_examples_are_always_separated():
    pool = unit_rows([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]])
    for first in permutations(range(4)):
        blocks = [torch.tensor(first[:2]), torch.tensor(first[2:])]
        assert all(closest(pool, part.tolist()) < 0.9 for part in deduplicate(blocks, [], pool, 0.9))
