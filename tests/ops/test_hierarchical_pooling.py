"""Laws of hierarchical pooling and selection: means by true counts, picks equal to a search of every node."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from log_linear_oracle import pooled, select

from foveate.ops import select_blocks
from foveate.ops.hierarchical_pooling import automatic_levels, count_tokens, pool


def qk(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(2)]


def most_levels(tokens, block):
    """The first level that is a single node."""
    return next((level for level in range(1, 4) if tokens <= block**level), 4)


def plain(lists):
    """Lists without the -1 at their end."""
    return [[number for number in row if number >= 0] for row in lists.tolist()]


def check(q, k, top_k, block, levels, real=None):
    """Assert that lists equal a search, whatever padding holds, and that counts are the real tokens of the nodes."""
    given = (q, k) if real is None else (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k))
    selection = select_blocks(*given, top_k=top_k, block_size=block, levels=levels, key_padding_mask=real)
    assert selection[2:] == (q.shape[2], block, top_k, real is None)
    assert selection.levels == levels
    everyone = torch.ones(q.shape[::2], dtype=torch.bool) if real is None else real
    for level, (lists, counts) in enumerate(zip(*selection[:2], strict=True), start=1):
        assert lists.dtype == torch.int32
        assert torch.equal(counts.expand(len(q), -1).double(), pooled(k, everyone, block, level)[1])
    for b, h in product(range(q.shape[0]), range(q.shape[1])):
        want = select(q[b, h], k[b, h], top_k, block, levels, everyone[b])
        assert [plain(lists[b, h]) for lists in selection.lists] == want


def padding(seed, batch, tokens, share):
    return torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 255, 257, 1000, 4097])
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_of_the_real_tokens_of_each_node(tokens, masked):
    levels = most_levels(tokens, 16)
    x, _ = qk(tokens, 2, 3, tokens, 4)
    real = padding(tokens, 2, tokens, 0.5) if masked else None
    everyone = torch.ones(2, tokens, dtype=torch.bool) if real is None else real
    x = x * everyone[:, None, :, None]
    counts = count_tokens(x, real, 16, levels)
    for level, (means, count) in enumerate(zip(pool(x, counts, 16), counts, strict=True), start=1):
        want, members_of = pooled(x, everyone, 16, level)
        assert torch.equal(count.expand(2, -1).double(), members_of)
        torch.testing.assert_close(means, want)


def test_half_precision_is_summed_in_float32():
    x = qk(0, 1, 2, 5000, 32)[0].bfloat16()
    counts = count_tokens(x, None, 16, 3)
    for means, want in zip(pool(x, counts, 16), pool(x.double(), counts, 16), strict=True):
        assert means.dtype == torch.float32
        torch.testing.assert_close(means.double(), want, rtol=1e-5, atol=1e-6)


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 700),
    top_k=st.integers(1, 13),
    block=st.sampled_from([16, 32, 64]),
    level=st.integers(1, 4),
    share=st.sampled_from([None, 0.9, 0.05]),
)
def test_picks_equal_a_search_node_by_node(seed, tokens, top_k, block, level, share):
    q, k = qk(seed, 2, 2, tokens, 32)
    real = None if share is None else padding(seed, 2, tokens, share)
    check(q, k, top_k, block, min(level, most_levels(tokens, block)), real)


@pytest.mark.parametrize("top_k", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_picks_on_four_levels_equal_a_search(top_k):
    q, k = qk(top_k, 1, 1, 4500, 32)
    check(q, k, top_k, 16, 4)


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 400), top_k=st.integers(1, 8))
def test_ties_go_to_the_first(seed, tokens, top_k):
    q, k = (x.sign() * (x.abs() > 1) for x in qk(seed, 1, 1, -(-tokens // 16), 32))  # many ties
    q, k = (x.repeat_interleave(16, 2)[:, :, :tokens].float() for x in (q, k))
    check(q, k, top_k, 16, most_levels(tokens, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_candidate_scores_higher_than_a_pick(dtype):
    q, k = qk(4, 1, 2, 3000, 64, dtype=dtype)
    selection = select_blocks(q, k, top_k=5, levels=2)
    real = torch.ones(1, 3000, dtype=torch.bool)
    for level, lists in enumerate(selection.lists, start=1):
        (queries, _), (keys, count) = (pooled(x.double(), real, 16, level) for x in (q, k))
        scores = queries.to(dtype).double() @ keys.to(dtype).double().mT
        if level < selection.levels:
            parents = selection.lists[level].repeat_interleave(16, 2)[:, :, : lists.shape[2]]
            allowed = (torch.arange(count.shape[1]) // 16 == parents[..., None]).any(-2)
            scores = scores.masked_fill(~allowed, -torch.inf)
        picked = scores.take_along_dim(lists.long(), -1)
        others = scores.scatter(-1, lists.long(), -torch.inf)
        assert (picked.amin(-1) >= others.amax(-1) - 0.02 * (dtype != torch.float32) - 1e-5).all()


def test_a_nan_key_is_picked_so_that_it_propagates():
    q, k = qk(10, 1, 1, 640, 32)
    k[:, :, 333] = torch.nan
    (lists,) = select_blocks(q, k, top_k=2, levels=1).lists
    assert (lists == 333 // 16).any(-1).all()


def test_pieces_of_any_size_give_the_same_picks(monkeypatch):
    q, k = qk(11, 2, 2, 1500, 32)
    want = select_blocks(q, k, levels=2)
    monkeypatch.setattr("foveate.ops.hierarchical_pooling.AT_ONCE", 1)
    got = select_blocks(q, k, levels=2)
    assert all(torch.equal(a, b) for a, b in zip(got.lists, want.lists, strict=True))


@pytest.mark.parametrize(
    ("tokens", "levels"),
    [(1, 1), (4096, 1), (4097, 2), (65536, 2), (65537, 3), (2**20, 3), (2**22, 4), (2**30, 4)],
)
def test_automatic_levels_follow_the_rule(tokens, levels):
    assert automatic_levels(tokens) == levels
    assert levels == 4 or -(-tokens // 16**levels) <= 2 * 8 * 16
    assert levels == 1 or -(-tokens // 16 ** (levels - 1)) > 2 * 8 * 16


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_transpose_lists_the_nodes_that_picked_each_node(level, masked):
    q, k = qk(12, 2, 2, 900, 32)
    real = padding(12, 2, 900, 0.01) if masked else None
    selection = select_blocks(q, k, top_k=4, levels=2, key_padding_mask=real)
    readers = selection.transpose(level)
    for b in range(2):
        for h in range(2):
            lists = plain(selection.lists[level - 1][b, h])
            offsets, rows = readers.offsets[b, h].tolist(), readers.rows[b, h].tolist()
            for node in range(len(lists)):
                want = [row for row, picks in enumerate(lists) if node in picks]
                assert rows[offsets[node] : offsets[node + 1]] == want
            assert set(rows[offsets[-1] :]) <= {-1}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 2, 99, 32)}, r"\[1, 2, 100, 32\], \[1, 2, 99, 32\]"),
        ({"k": torch.zeros(1, 1, 100, 32)}, r"repeat key heads .* \[1, 1, 100, 32\]"),
        ({"k": torch.zeros(1, 2, 100, 32).half()}, r"torch.float32 on cpu, torch.float16"),
        ({"q": torch.zeros(2, 100, 32)}, r"got \[2, 100, 32\]"),
        ({"q": torch.zeros(1, 2, 0, 32), "k": torch.zeros(1, 2, 0, 32)}, r"not empty.*\[1, 2, 0, 32\]"),
        ({"q": torch.zeros(1, 2, 100, 32).int(), "k": torch.zeros(1, 2, 100, 32).int()}, "torch.int32"),
        ({"q": torch.zeros(1, 2, 100, 16), "k": torch.zeros(1, 2, 100, 16)}, "32 to 256, not 16"),
        ({"q": torch.zeros(1, 2, 100, 257), "k": torch.zeros(1, 2, 100, 257)}, "32 to 256, not 257"),
        ({"top_k": 0}, "1 or more, not 0"),
        ({"block_size": 48}, "16, 32, 64, not 48"),
        ({"levels": 0}, "1 to 4, or None for automatic, not 0"),
        ({"levels": 5}, "not 5"),
        ({"levels": 3}, "levels=3 is too many for 100 tokens.* level 2 is one node already; use levels<=2"),
        ({"key_padding_mask": torch.ones(1, 99, dtype=torch.bool)}, r"\[1, 100\].* got torch.bool, \[1, 99\]"),
        ({"key_padding_mask": torch.ones(1, 100)}, "must be bool.* got torch.float32"),
    ],
)
def test_mismatched_inputs_are_refused(change, message):
    inputs = {"q": torch.zeros(1, 2, 100, 32), "k": torch.zeros(1, 2, 100, 32)}
    with pytest.raises(ValueError, match=message):
        select_blocks(**(inputs | change))
