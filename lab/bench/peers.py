# pyright: basic, reportPrivateImportUsage=false
"""Implementations of attention to compare with: dense, over a block table, and over lists of blocks for each head.

Packages that are not installed are peers too: they say so when they are prepared or called, and the benchmark lists
them with that reason.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import block_attention, dispatch
from foveate.ops.block_table import BlockTable
from foveate.utils.device import versions

__all__ = ["LISTED", "Attention", "Listed", "Peer", "dense", "flex", "peers", "versions_with_peers"]

del block_attention  # imported to register its backends

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PACKAGES = {  # how to install what a module is in
    "flash_attn_interface": "build the folder hopper of flash-attention",
    "flash_attn.cute": "pip install flash-attn-4",
    "cudnn": "pip install nvidia-cudnn-frontend",
    "fastvideo_kernel": "pip install fastvideo-kernel",
}
DISTRIBUTIONS = "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "fastvideo-kernel"


class Peer(NamedTuple):
    """An implementation of attention.

    Attributes:
        name: Name in tables.
        sparse: Whether it follows the block table; dense attention does not.
        prepare: Returns the attention over a table for queries of the shape and device of a tensor
            [batch, heads, tokens, head_dim]. The preparation is not timed.
    """

    name: str
    sparse: bool
    prepare: Callable[[BlockTable, Tensor], Attention]


def peers(device: torch.device, dtype: torch.dtype, head_dim: int, backward: bool = False) -> list[Peer]:
    """Implementations on a device: dense attention, others over a block table, and all backends of Foveate."""
    ours = [_ours(backend) for backend in dispatch.backends("block_attention", device, dtype, head_dim)]
    everything = [
        Peer(name, False, lambda *_, attention=attention: attention)
        for name, attention in dense(device, backward).items()
    ]
    if device.type == "cuda":
        everything.append(Peer("FlexAttention", True, lambda table, q: flex(table, q.device)))
        everything += [Peer(f"{name}, block lists", True, partial(_listed, attend)) for name, attend in LISTED.items()]
    return [*everything, *ours]


def dense(device: torch.device, backward: bool = False) -> dict[str, Attention]:
    """Dense attention by name. With `backward`, also the deterministic mode of an implementation that has another."""
    if device.type != "cuda":
        return {"dense": scaled_dot_product_attention}
    deterministic = {"FA4 deterministic, dense": _flash("flash_attn.cute.interface", deterministic=True)}
    return {
        "cuDNN, dense": _dense(SDPBackend.CUDNN_ATTENTION),
        "FA2, dense": _dense(SDPBackend.FLASH_ATTENTION),
        "FA3, dense": _flash("flash_attn_interface"),
        "FA4, dense": _flash("flash_attn.cute.interface"),
        **(deterministic if backward else {}),
    }


def versions_with_peers() -> dict[str, str]:
    """`versions`, and those of the packages of peers that are installed."""
    found = versions()
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


@cache
def _module(name: str) -> Any:
    """A module of another package.

    Raises:
        ImportError: If it cannot be imported, with how to install it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        remedy = next(text for package, text in PACKAGES.items() if name.startswith(package))
        raise ImportError(f"not installed: {remedy} ({error})") from None


def _ours(backend: dispatch.Backend) -> Peer:
    def prepare(table: BlockTable, q: Tensor) -> Attention:
        return lambda q, k, v: backend.run(q, k, v, table, q.shape[-1] ** -0.5, False)[0]

    return Peer(f"foveate, {backend.name}", True, prepare)


def _dense(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attention


def _flash(module: str, **options: Any) -> Attention:
    """`flash_attn_func` of a module, which takes [batch, tokens, heads, head_dim]."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _module(module).flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions return the LSE as well

    return attention


def flex(table: BlockTable, device: torch.device) -> Attention:
    """FlexAttention over a block table, compiled on a GPU."""
    blocks = _blocks(table).to(device)
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff()).to(device) for starts in table[:2]
    )
    compiled = device.type == "cuda"
    make_mask: Callable[..., BlockMask] = torch.compile(create_block_mask) if compiled else create_block_mask
    attention: Callable[..., Tensor] = torch.compile(flex_attention) if compiled else flex_attention
    mask = make_mask(  # without compilation it would take the memory of all pairs
        lambda batch, head, query, key: blocks[of_query[query], of_key[key]],
        None, None, table.query_tokens, table.key_tokens, device,
    )  # fmt: skip
    return lambda q, k, v: attention(q, k, v, block_mask=mask)


def _blocks(table: BlockTable) -> Tensor:
    """Pattern of a table as a mask over blocks."""
    blocks = torch.zeros(len(table.offsets) - 1, len(table.key_starts) - 1, dtype=torch.bool)
    for row, keys in zip(blocks, table.lists(), strict=True):
        row[keys] = True
    return blocks


# --- lists of blocks of one size, which may differ from head to head ---


class Listed(NamedTuple):
    """Attention over blocks of one size.

    Attributes:
        sizes: Sizes of blocks that it supports, in tokens.
        attend: Returns the attention for bool [batch, heads, query blocks, key blocks], and the size of the blocks.
    """

    sizes: tuple[int, ...]
    attend: Callable[[Tensor, int], Attention]


def _listed(peer: Listed, table: BlockTable, q: Tensor) -> Attention:
    """Attention over a block table.

    Raises:
        ValueError: If the blocks of the table do not all have one of the supported sizes.
    """
    found = {int(size) for starts in table[:2] for size in starts.diff()}
    if len(found) > 1 or not found <= set(peer.sizes):
        takes, has = " or ".join(map(str, peer.sizes)), " and ".join(map(str, sorted(found)))
        raise ValueError(f"takes blocks of one size, {takes} tokens; this table has blocks of {has}")
    return peer.attend(_blocks(table).to(q.device).expand(*q.shape[:2], -1, -1), found.pop())


def _packed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, and their indices before the others, both int32."""
    order = torch.argsort(blocks.byte(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int().contiguous()


def _flash4_listed(blocks: Tensor, size: int) -> Attention:
    """FlashAttention 4. Its gradients on Hopper are not deterministic with lists of blocks."""
    sparsity = _module("flash_attn.cute.block_sparsity")

    def tensors(blocks: Tensor) -> Any:
        counts, indices = _packed(blocks)
        nothing = torch.zeros_like(counts), torch.zeros_like(indices)  # no block needs a mask within
        return sparsity.BlockSparseTensorsTorch(*nothing, counts, indices, block_size=(size, size))

    lists = {"block_sparse_tensors": tensors(blocks), "block_sparse_tensors_bwd": tensors(blocks.mT)}
    return _flash("flash_attn.cute.interface", **lists)


def _cudnn_listed(blocks: Tensor, size: int) -> Attention:
    """Block-sparse attention of cuDNN's frontend, whose backward pass is a function of its own."""
    bsa = _module("cudnn").BSA
    counts, indices = _packed(blocks)
    lists = {"q2k_block_nums": counts, "sparse_block_size": size, "layout": "bshd"}

    class BlockSparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: Tensor) -> Tensor:
            out, lse = bsa.block_sparse_attention_forward(*qkv, indices, **lists)
            ctx.save_for_backward(*qkv, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return tuple(bsa.block_sparse_attention_backward(grad, *ctx.saved_tensors, indices, **lists))

    return lambda q, k, v: BlockSparse.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _fastvideo_listed(blocks: Tensor, size: int) -> Attention:
    """Block-sparse attention of FastVideo. It copies tensors whose heads do not lie side by side."""
    attend = _module("fastvideo_kernel").block_sparse_attn_from_indices
    counts, indices = _packed(blocks)
    sizes = torch.full(blocks.shape[-1:], size, dtype=torch.int32, device=blocks.device)
    return lambda q, k, v: attend(q, k, v, indices, counts, sizes)[0]


LISTED = {
    "FA4": Listed((128,), _flash4_listed),
    "cuDNN": Listed((64, 128), _cudnn_listed),
    "fastvideo": Listed((64,), _fastvideo_listed),
}
"""Attention over blocks of one size by name: FlashAttention 4, cuDNN's frontend and FastVideo."""
