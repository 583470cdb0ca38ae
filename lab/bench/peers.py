# pyright: basic, reportPrivateImportUsage=false
"""Implementations of attention to compare with, dense and over a block table."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import block_attention, dispatch
from foveate.ops.block_table import BlockTable

__all__ = ["Attention", "Peer", "dense", "flex", "peers"]

del block_attention  # imported to register its backends

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """An implementation of attention.

    Attributes:
        name: Name in tables.
        sparse: Whether it follows the block table; dense attention does not.
        prepare: Returns the attention over a table on a device. The preparation is not timed.
    """

    name: str
    sparse: bool
    prepare: Callable[[BlockTable, torch.device], Attention]


def peers(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[Peer]:
    """Implementations on a device: dense attention first, then FlexAttention, then every backend of Foveate."""
    ours = [_ours(backend) for backend in dispatch.backends("block_attention", device, dtype, head_dim)]
    everything = [
        Peer(name, False, lambda *_, attention=attention: attention) for name, attention in dense(device).items()
    ]
    if device.type == "cuda":
        everything.append(Peer("FlexAttention", True, flex))
    return [*everything, *ours]


def dense(device: torch.device) -> dict[str, Attention]:
    """Dense attention by name, the fastest first."""
    if device.type != "cuda":
        return {"dense": scaled_dot_product_attention}
    return {
        "cuDNN, dense": _dense(SDPBackend.CUDNN_ATTENTION),
        "FA2, dense": _dense(SDPBackend.FLASH_ATTENTION),
    }


def _ours(backend: dispatch.Backend) -> Peer:
    def prepare(table: BlockTable, device: torch.device) -> Attention:
        return lambda q, k, v: backend.run(q, k, v, table, q.shape[-1] ** -0.5, False)[0]

    return Peer(f"foveate, {backend.name}", True, prepare)


def _dense(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attention


def flex(table: BlockTable, device: torch.device) -> Attention:
    """FlexAttention over a block table, compiled on a GPU."""
    blocks = torch.zeros(len(table.offsets) - 1, len(table.key_starts) - 1, dtype=torch.bool)
    for row, keys in zip(blocks, table.lists(), strict=True):
        row[keys] = True
    blocks = blocks.to(device)
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
