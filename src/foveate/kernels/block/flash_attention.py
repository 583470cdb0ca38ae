# pyright: basic, reportArgumentType=false, reportMissingImports=false
"""Attention over a block table by FlashAttention 4, on Hopper and Blackwell GPUs (extra ``foveate[flash]``).

FlashAttention 4 reads lists of whole blocks. A block that only some of its queries read in full is *partial*: there, a
mask function looks up each pair of a query and a key.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.kernels.launch import compute_capability, empty_like, empty_lse, half_precision
from foveate.ops.block_table import BlockTable
from foveate.utils.cache import WeakTensorCache

__all__ = ["backward", "differentiates", "forward", "supports"]

HOPPER, BLACKWELL, END = 90, 100, 120  # desktop chips (120) have no block lists in FlashAttention 4
WIDE = 128  # wider heads need shorter blocks of keys
PACKAGE = find_spec("flash_attn")  # a constant, as compiled code cannot look for packages; FlashAttention 2 shares it
INSTALLED = PACKAGE is not None and any((Path(x) / "cute").is_dir() for x in PACKAGE.submodule_search_locations or ())
_LISTS: WeakTensorCache["_Lists"] = WeakTensorCache()


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention 4 is installed and reads block lists on this GPU, for this dtype and head_dim."""
    if device.type != "cuda" or not half_precision(dtype) or head_dim % 8 or not INSTALLED:
        return False
    capability = compute_capability(device.index or 0)
    widths = head_dim <= 256 if capability < BLACKWELL else head_dim <= 128 or head_dim == 256
    return HOPPER <= capability < END and widths


def differentiates(device: torch.device) -> bool:
    """Whether its gradients for block lists are deterministic on this GPU: on Blackwell."""
    return compute_capability(device.index or 0) >= BLACKWELL


class _Lists(NamedTuple):
    """A table for FlashAttention 4: its block lists for each direction, and the arguments of its mask function."""

    forward: Any
    backward: Any
    mask: dict[str, Any]


def forward(q: Tensor, k: Tensor, v: Tensor, table: BlockTable, scale: float) -> tuple[Tensor, Tensor]:
    """Output, in q's layout, and natural LSE. Tensors are [batch, heads, tokens, head_dim]."""
    from flash_attn.cute.interface import _flash_attn_fwd

    lists = _lists_of(q, k, table)
    out, lse = empty_like(q), empty_lse(q)
    q, k, v, placed = (x.transpose(1, 2) for x in (q, k, v, out))
    _flash_attn_fwd(
        q, k, v, softmax_scale=scale, return_lse=True, out=placed, lse=lse, block_sparse_tensors=lists.forward,
        **lists.mask,
    )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    table: BlockTable, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v; deterministic where `differentiates`."""
    from flash_attn.cute.interface import _flash_attn_bwd

    lists = _lists_of(q, k, table)
    grads = [empty_like(x) for x in (q, k, v)]
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    _flash_attn_bwd(
        *(x.transpose(1, 2) for x in (q, k, v, out, grad_out)), lse, softmax_scale=scale, dlse=grad_lse,
        dq=dq, dk=dk, dv=dv, deterministic=differentiates(q.device), block_sparse_tensors=lists.backward, **lists.mask,
    )  # fmt: skip
    return tuple(grads)


def _lists_of(q: Tensor, k: Tensor, table: BlockTable) -> _Lists:
    """Cached block lists of a table for these queries and keys."""

    def make() -> _Lists:
        table.check(q, k)
        return _make_lists(table, block, q.device)

    blackwell = compute_capability(q.device.index or 0) >= BLACKWELL
    block = 256 if blackwell else 128, 128 if blackwell or q.shape[3] <= WIDE else 64
    return _LISTS.get(table, (q.shape[2], k.shape[2], *block, q.device), make)


def _make_lists(table: BlockTable, block: tuple[int, int], device: torch.device) -> _Lists:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

    full, partial, mask = block_lists(table, block)
    width = {"block_size": block}
    ahead = BlockSparseTensorsTorch(*_packed(partial, device), *_packed(full, device), **width)
    back = BlockSparseTensorsTorch(*_packed(partial.T, device), *_packed(full.T, device), **width)
    order, order_full = map(_contiguous, compute_dq_write_order(*ahead[:4], *back[:4]))
    back = back._replace(dq_write_order=order, dq_write_order_full=order_full, spt=False)
    if not partial.any():
        return _Lists(ahead, back, {})
    return _Lists(ahead, back, {"mask_mod": _mask_function(), "aux_tensors": [x.to(device) for x in mask]})


def block_lists(table: BlockTable, block: tuple[int, int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Whole blocks of a table: which are read in full, which in part, and a lookup for the pairs of the latter.

    Args:
        table: The table.
        block: Number of queries and of keys in a block.

    Returns:
        Two bool matrices [blocks of queries, blocks of keys], and int32 tensors ``rows``, ``columns`` and ``reads``:
        query i reads key j where ``reads[rows[i] + columns[j]]`` is 1. Rows and columns are padded to whole blocks.
    """
    reads, kinds = table.dense_blocks(), []
    for axis, starts in enumerate((table.query_starts, table.key_starts)):
        reads, kind = torch.unique(reads, dim=axis, return_inverse=True)  # blocks with the same pattern are one kind
        kinds.append(kind.repeat_interleave(starts.diff()))
    present = [_present(kind, size, number) for kind, size, number in zip(kinds, block, reads.shape, strict=True)]
    pairs = present[0] @ reads.float() @ present[1].T
    full = pairs == present[0].sum(1)[:, None] * present[1].sum(1)[None]
    rows, columns = (torch.cat([kind, kind.new_zeros(-len(kind) % max(block))]).int() for kind in kinds)
    return full, (pairs > 0) & ~full, [rows * reads.shape[1], columns, reads.flatten().int()]


def _present(kind: Tensor, block: int, number: int) -> Tensor:
    """Which of `number` kinds each block of tokens has: float [blocks, number]."""
    found = torch.zeros(-(-len(kind) // block), number)
    found[torch.arange(len(kind)) // block, kind] = 1
    return found


def _packed(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks of each row, and their indices, for all samples: int32 [1, 1, rows(, most)]."""
    counts = chosen.sum(1)
    indices = chosen.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(counts.max()))]
    return _contiguous(counts[None, None].int()).to(device), _contiguous(indices[None, None].int()).to(device)


def _contiguous(x: Tensor) -> Tensor:
    """A copy with last stride 1; `Tensor.contiguous` leaves any stride of a dimension of size 1 as it is."""
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _mask_function() -> Any:
    """Function of FlashAttention 4's domain-specific language: whether a query reads a key, by `block_lists`."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def reads(batch, head, query, key, lengths, lookup):  # pyright: ignore[reportMissingParameterType]
        rows, columns, table = lookup
        row, column = rows[utils.ssa_to_scalar(query)], columns[utils.ssa_to_scalar(key)]
        return utils.scalar_to_ssa(table[row + column], cutlass.Int32) != utils.scalar_to_ssa(0, cutlass.Int32)

    return reads
