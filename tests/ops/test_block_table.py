"""Laws of the block table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_table
from torch.nn.functional import pad

from foveate.ops.block_table import block_starts, block_table

seeds = st.integers(0, 2**31)


@given(seed=seeds)
def test_pairs_flops_and_sparsity_count_the_dense_mask(seed):
    table = random_table(seed, queries=(63, 0, 100), keys=(500, 7))
    mask = table.to_dense()
    assert mask.shape == (163, 507)
    assert table.pairs() == mask.sum()
    assert table.sparsity() == pytest.approx(1 - mask.double().mean().item())
    assert table.flops(heads=3, head_dim=8) == 4 * 3 * 8 * mask.sum()
    assert table.flops(heads=3, head_dim=8, backward=True) == 14 * 3 * 8 * mask.sum()


@given(seed=seeds)
def test_transpose_is_the_transposed_mask_and_its_own_inverse(seed):
    table = random_table(seed, queries=(200,), keys=(130, 40))
    assert torch.equal(table.transpose().to_dense(), table.to_dense().T)
    assert table.transpose().transpose().lists() == table.lists()
    assert all(keys == sorted(keys) for keys in table.transpose().lists())


@given(seed=seeds)
def test_padding_changes_only_the_shape(seed):
    table = random_table(seed, queries=(200,), keys=(130,))
    padded = table.padded(40, 50, 999)
    assert [len(tensor) for tensor in padded] == [41, 51, 41, 999]
    assert torch.equal(padded.to_dense(), table.to_dense())
    assert (padded.pairs(), padded.query_tokens, padded.key_tokens) == (table.pairs(), 200, 130)
    assert torch.equal(padded.transpose().to_dense(), table.to_dense().T)


@given(runs=st.lists(st.integers(0, 300), min_size=1, max_size=6), block=st.integers(1, 130))
def test_runs_are_cut_into_full_blocks_and_one_remainder_each(runs, block):
    lengths = block_starts(*runs, block=block).diff().tolist()
    expected = [min(block, run - start) for run in runs for start in range(0, run, block)]
    assert lengths == expected


def test_lists_are_kept_whatever_their_order():
    table = block_table([[2, 0], [], [1]], block_starts(10, 5, 7))
    assert table.lists() == [[0, 2], [], [1]]


@pytest.mark.parametrize(
    ("lists", "starts", "message"),
    [
        ([[0], [2]], [0, 64, 100], "query block 1 reads key block 2, but there are 2"),
        ([[0], [-1]], [0, 64, 100], "reads key block"),
        ([[0, 0], []], [0, 64, 100], "query block 0 lists a key block twice"),
        ([[0]], [0, 64, 100], "1 lists for 2 query blocks"),
        ([[0], [0]], [0, 64, 60], "must ascend"),
        ([[0]], [1, 64], "must ascend from 0"),
    ],
)
def test_bad_tables_are_refused_with_the_value(lists, starts, message):
    with pytest.raises(ValueError, match=message):
        block_table(lists, torch.tensor(starts, dtype=torch.int32))


def test_bad_runs_are_refused():
    with pytest.raises(ValueError, match="blocks of 0"):
        block_starts(10, block=0)
    with pytest.raises(ValueError, match=r"runs of \(-1,\)"):
        block_starts(-1)


@given(seed=seeds)
def test_all_queries_read_the_first_keys(seed):
    table = random_table(seed, queries=(200,), keys=(130,)).padded(40, 50, 999)
    more = table.with_first_keys(100)
    assert torch.equal(more.to_dense(), pad(table.to_dense(), (100, 0), value=True))
    assert [len(tensor) for tensor in more] == [41, 53, 41, 999 + 2 * 40]
