"""Laws of the peers: other packages get the lists that they document, and a missing one says how to install it.

The packages need a GPU, so stand-ins with their signatures compute what is documented, in PyTorch.
"""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from lab.bench import log_linear, peers
from lab.bench.attention import Case, bench_attention
from lab.bench.log_linear import Settings
from lab.bench.peers import LISTED
from torch.nn.functional import scaled_dot_product_attention

from foveate import HilbertA
from foveate.ops.block_attention import block_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple


def visible(counts, indices):
    """The mask over blocks that lists describe."""
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous()
    assert indices.is_contiguous()
    used = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), used)


def attend(q, k, v, blocks, size):
    mask = blocks.repeat_interleave(size, -2).repeat_interleave(size, -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def flash_attn_func(q, k, v, *, deterministic=False, block_sparse_tensors=None, block_sparse_tensors_bwd=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, q.shape[2], k.shape[2])
    size = 1
    if block_sparse_tensors:
        partial, _, *full, (size, _) = block_sparse_tensors
        assert not partial.any()
        blocks = visible(*full)
        assert torch.equal(visible(*block_sparse_tensors_bwd[2:4]), blocks.mT)
    return attend(q, k, v, blocks, size).transpose(1, 2), None


def cudnn_forward(q, k, v, indices, *, q2k_block_nums, sparse_block_size, layout):
    assert layout == "bshd"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert q2k_block_nums.shape[:2] == q.shape[:2]
    out = attend(q, k, v, visible(q2k_block_nums, indices), sparse_block_size)
    return out.transpose(1, 2), torch.empty(q.shape[:3])


def cudnn_backward(grad, q, k, v, out, lse, indices, **lists):
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again = cudnn_forward(*qkv, indices, **lists)[0]
    assert torch.equal(again, out)
    return torch.autograd.grad(again, qkv, grad)


def fastvideo(q, k, v, indices, counts, sizes):
    assert sizes.tolist() == [64] * (k.shape[2] // 64)
    return attend(q, k, v, visible(counts, indices), 64), None


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for the packages."""
    bsa = SimpleNamespace(block_sparse_attention_forward=cudnn_forward, block_sparse_attention_backward=cudnn_backward)
    modules = {
        "flash_attn.cute.interface": SimpleNamespace(flash_attn_func=flash_attn_func),
        "flash_attn.cute.block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=BlockSparseTensorsTorch),
        "cudnn": SimpleNamespace(BSA=bsa),
        "fastvideo_kernel": SimpleNamespace(block_sparse_attn_from_indices=fastvideo),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    peers._module.cache_clear()


@pytest.fixture
def missing(monkeypatch):
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute.interface", "cudnn", "fastvideo_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    peers._module.cache_clear()


def qkv(tokens, heads=2, dim=32):
    return [torch.randn(1, tokens, heads, dim).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, peer in LISTED.items() for size in peer.sizes])
def test_lists_of_blocks_follow_the_table_and_have_its_gradients(name, size):
    case = Case(512, HilbertA(tiles=4, centre=0, align=size))
    table = case.table(256)
    q, k, v = qkv(table.query_tokens)
    attention = peers._listed(LISTED[name], table, q)
    got, want = attention(q, k, v), block_attention(q, k, v, table)
    assert torch.allclose(got, want, atol=1e-5)
    grads = [torch.autograd.grad(out, (q, k, v), q.detach()) for out in (got, want)]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*grads, strict=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("text", "sizes"), [(300, "44 and 64"), (256, "64")])
def test_lists_of_blocks_refuse_other_blocks(text, sizes):
    table = Case(512, HilbertA(tiles=4)).table(text)
    with pytest.raises(ValueError, match=f"one size, 128 tokens; this table has blocks of {sizes}$"):
        peers._listed(LISTED["FA4"], table, qkv(table.query_tokens)[0])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", LISTED)
def test_lists_for_each_head_are_checked_against_float64_before_they_are_timed(name):
    settings = Settings(CPU, torch.float32, backward=True)
    case = log_linear.Case(2048, 3, 32, None, 2, 16, "balanced")
    given = log_linear._given(name, LISTED[name], case)
    assert given.keys(2048) == 256
    inputs = case.tensors(settings)
    errors = log_linear._checked(given, inputs, True)
    assert set(errors) == {"error", "key_gradient_error"}
    assert max(errors.values()) < 1e-5
    _, (lists,) = given.attend(*inputs)
    assert lists.shape == (1, 3, 2048 // max(LISTED[name].sizes), 256 // max(LISTED[name].sizes))
    assert not torch.equal(lists[0, 0], lists[0, 1])  # each head has its own
    with pytest.raises(ValueError, match="not timed"):
        log_linear._checked(given._replace(attend=lambda q, k, v: (v, [lists])), inputs, False)


@pytest.mark.usefixtures("installed")
def test_flash_attention_4_gets_tokens_before_heads():
    q, k, v = qkv(100)
    for backward in (False, True):
        implementations = peers.dense(CUDA, backward)
        assert ("FA4 deterministic, dense" in implementations) == backward
        for name in [name for name in implementations if name.startswith("FA4")]:
            assert torch.allclose(implementations[name](q, k, v), scaled_dot_product_attention(q, k, v), atol=1e-5)


@pytest.mark.usefixtures("missing")
def test_a_package_that_is_not_installed_is_listed_with_how_to_install_it():
    others = "FA3, dense", "FA4, dense", *(f"{name}, block lists" for name in LISTED)
    everyone = [peer for peer in peers.peers(CUDA, torch.float32, 16) if peer.name in others]
    everyone += peers.peers(CPU, torch.float32, 16)
    case = Case(512, HilbertA(tiles=4, centre=0, align=128))
    *_, result = bench_attention(
        [case], CPU, torch.float32, heads=2, head_dim=16, text=256, rounds=1, everyone=lambda *_: everyone
    )
    rows = {row["peer"]: row for row in result["rows"]}
    reasons = {name: row.get("failed", "").partition(" (")[0] for name, row in rows.items()}
    assert reasons == {
        "FA3, dense": "not installed: build the folder hopper of flash-attention",
        "FA4, dense": "not installed: pip install flash-attn-4",
        "FA4, block lists": "not installed: pip install flash-attn-4",
        "cuDNN, block lists": "not installed: pip install nvidia-cudnn-frontend",
        "fastvideo, block lists": "takes blocks of one size, 64 tokens; this table has blocks of 128",
        "dense": "",
        "foveate, portable": "",
    }
    assert rows["foveate, portable"]["fastest_dense"] == "dense"
