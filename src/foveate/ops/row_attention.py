"""Causal attention of some rows of a sequence over all its keys and values.

Patching a cache recomputes a few rows anywhere in the context; the prompt is its last rows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import dispatch

__all__ = ["row_attention"]

SLICE = 512  # rows whose mask is held in memory at once


def row_attention(
    q: Float[Tensor, "batch heads chosen dim"],
    k: Float[Tensor, "batch groups tokens dim"],
    v: Float[Tensor, "batch groups tokens dim"],
    rows: Int[Tensor, "chosen"],
    scale: float | None = None,
) -> Float[Tensor, "batch heads chosen dim"]:
    """Attention of each given row over the keys up to its own; head h reads those of group h // (heads / groups).

    Not differentiable on GPUs.

    Args:
        q: Queries of the rows.
        k: Keys of all tokens.
        v: Values of all tokens.
        rows: Indices of the rows, ascending. They must never be changed in place, and are not checked on a GPU.
        scale: Factor on q·k; ``dim ** -0.5`` if None.

    Raises:
        ValueError: If shapes do not match, heads is not a multiple of groups, or rows do not ascend within range.

    Examples:
        >>> x = torch.randn(1, 2, 9, 8)
        >>> every = row_attention(x, x, x, torch.arange(9))
        >>> some = torch.tensor([3, 7])
        >>> torch.allclose(row_attention(x[:, :, some], x, x, some), every[:, :, some], atol=1e-6)
        True
    """
    if k.shape != v.shape or q.shape[::3] != k.shape[::3] or len(rows) != q.shape[2]:
        raise ValueError(
            "q must be [batch, heads, rows, dim], k and v [batch, groups, tokens, dim]: "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)} and {len(rows)} row indices"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k.shape[1]} groups of keys: use a multiple")
    known = rows.device.type == "cpu" and len(rows)  # on a GPU, checking would synchronize
    if known and (rows[0] < 0 or rows[-1] >= k.shape[2] or (rows.diff() < 0).any()):
        raise ValueError(f"rows must ascend within 0 to {k.shape[2] - 1}, not {rows.tolist()[:8]}...: sort them")
    backend = dispatch.choose("row_attention", q.device, q.dtype, q.shape[3])
    return backend.run(q, k, v, rows, q.shape[3] ** -0.5 if scale is None else scale)


@dispatch.register("row_attention", "portable")
def portable(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float) -> Tensor:
    """`row_attention` in plain PyTorch, one slice of rows at a time; the heads of a group are stacked as more rows."""
    share = q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (-1, share))  # [batch, groups, share, chosen, dim]
    out = torch.empty_like(q)
    for start in range(0, len(rows), SLICE):
        some = rows[start : start + SLICE]
        end = int(some[-1]) + 1 if rows.device.type == "cpu" else k.shape[2]  # on a GPU, reading it would synchronize
        mask = (some[:, None] >= torch.arange(end, device=rows.device)).repeat(share, 1)
        part = grouped[:, :, :, start : start + SLICE].flatten(2, 3)
        part = scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale)
        out[:, :, start : start + SLICE] = part.unflatten(2, (share, -1)).flatten(1, 2)
    return out


dispatch.register_kernels("row_attention", "rows")
