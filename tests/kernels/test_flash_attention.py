"""Laws of the lists for FlashAttention 4, which tests/gpu runs."""

from functools import cache

import pytest
import torch
from oracle import random_table

from foveate import HilbertA
from foveate.kernels import launch
from foveate.kernels.block import flash_attention
from foveate.kernels.block.flash_attention import _packed, block_lists, supports
from foveate.ops.block_table import BlockTable


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 64)])
@pytest.mark.parametrize(("queries", "keys"), [((63,), (63,)), ((200, 300), (150, 0, 70)), ((128, 256), (384,))])
def test_full_and_partial_blocks_with_their_lookup_are_the_table(queries, keys, block):
    table = random_table(int(torch.randint(2**31, ())), queries, keys)
    full, partial, (rows, columns, reads) = block_lists(table, block)
    want = table.to_dense()
    at = [torch.arange(n) // size for n, size in zip(want.shape, block, strict=True)]
    looked_up = reads[rows[: len(want)][:, None] + columns[: want.shape[1]][None]] == 1
    assert not (full & partial).any()
    assert torch.equal(full[at[0]][:, at[1]] | (partial[at[0]][:, at[1]] & looked_up), want)
    assert len(rows) % block[0] == len(columns) % block[1] == 0


def test_tables_of_whole_blocks_have_no_partial_blocks():
    table = HilbertA(tiles=16, slide="curve", align=128).plan(((64, 64),), 512, block=128).tables[1]
    assert isinstance(table, BlockTable)
    full, partial, _ = block_lists(table, (128, 128))
    assert full.any()
    assert not partial.any()


@pytest.mark.parametrize("blocks", [torch.eye(8), torch.ones(8, 1), torch.ones(1, 8), torch.ones(8, 8).tril()])
def test_lists_have_a_last_stride_of_1_also_where_a_dimension_has_one_entry(blocks):
    for chosen in (blocks.bool(), blocks.bool().T):
        counts, indices = _packed(chosen, torch.device("cpu"))
        assert counts.stride(-1) == indices.stride(-1) == 1
        for row, count, listed in zip(chosen, counts[0, 0], indices[0, 0], strict=True):
            assert listed[:count].tolist() == row.nonzero()[:, 0].tolist()


def test_only_gpus_with_block_lists_are_supported(monkeypatch):
    assert not supports(torch.device("cpu"), torch.bfloat16, 64)
    monkeypatch.setattr(flash_attention, "INSTALLED", True)
    for capability, runs in ((80, False), (90, True), (100, True), (120, False)):
        monkeypatch.setattr(flash_attention, "compute_capability", lambda index, found=capability: found)
        assert supports(torch.device("cuda"), torch.bfloat16, 64) is runs
        assert not supports(torch.device("cuda"), torch.bfloat16, 65)


def test_compiled_code_can_ask_whether_it_is_supported(monkeypatch):
    monkeypatch.setattr(flash_attention, "INSTALLED", True)
    monkeypatch.setattr(launch, "_capability", cache(lambda index: (9, 0)))
    monkeypatch.setattr(flash_attention, "find_spec", None)  # PyTorch 2.11 cannot compile code that looks for packages
    ask = torch.compile(lambda x: x + supports(torch.device("cuda"), x.dtype, 64), fullgraph=True, backend="eager")
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert torch.equal(ask(x), x + 1)
