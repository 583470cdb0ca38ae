"""Causal attention of some rows of a sequence over all its keys and values.

Patching a cache recomputes a few rows anywhere in the context; the prompt is its last rows.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from foveate.ops import dispatch

__all__ = ["row_attention", "row_attention_lse", "visible"]

SLICE = 512  # rows of the mask in memory at once


def row_attention(
    q: Float[Tensor, "batch heads chosen dim"],
    k: Float[Tensor, "batch groups tokens dim"],
    v: Float[Tensor, "batch groups tokens dim"],
    rows: Int[Tensor, "#batch chosen"] | Int[Tensor, "chosen"],
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
    last: Int[Tensor, "batch chosen"] | None = None,
) -> Float[Tensor, "batch heads chosen dim"]:
    """Attention of each given row over the keys up to its own; head h reads group h // (heads / groups).

    Not differentiable on GPUs.

    Args:
        q: Queries of the rows.
        k: Keys of all tokens.
        v: Values of all tokens.
        rows: Indices of the rows, ascending, for each sample or for all samples. They must never be changed in place,
            and are not checked on a GPU.
        scale: Factor on q·k; ``dim ** -0.5`` if None.
        window: Number of keys visible to a row, its own key included. None shows all of them.
        sinks: Logit of an attention sink for each head, which takes a share of the attention but has no value.
        last: Last key visible to each row, such as the end of its image in Gemma 3. None is its own key.

    Raises:
        ValueError: If shapes do not match, heads is not a multiple of groups, or rows do not ascend within range.

    Examples:
        >>> x = torch.randn(1, 2, 9, 8)
        >>> every = row_attention(x, x, x, torch.arange(9))
        >>> some = torch.tensor([3, 7])
        >>> torch.allclose(row_attention(x[:, :, some], x, x, some), every[:, :, some], atol=1e-6)
        True
    """
    _check(q, k, v, rows)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if last is not None:  # the kernel has no such limit
        return portable(q, k, v, rows.expand(len(q), -1), scale, window, sinks, last=last)[0]
    return dispatch.choose("row_attention", q.device, q.dtype, q.shape[3]).run(q, k, v, rows, scale, window, sinks)[0]


def row_attention_lse(
    q: Float[Tensor, "batch heads chosen dim"],
    k: Float[Tensor, "batch groups tokens dim"],
    v: Float[Tensor, "batch groups tokens dim"],
    rows: Int[Tensor, "#batch chosen"] | Int[Tensor, "chosen"],
    scale: float,
) -> tuple[Float[Tensor, "batch heads chosen dim"], Float[Tensor, "batch heads chosen"]]:
    """`row_attention`, and the log-sum-exp of each row's attention, to merge it with attention over other keys.

    Raises:
        ValueError: If shapes do not match, heads is not a multiple of groups, or rows do not ascend within range.
    """
    _check(q, k, v, rows)
    backend = dispatch.choose("row_attention", q.device, q.dtype, q.shape[3])
    return backend.run(q, k, v, rows, scale, None, None, True)


def _check(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> None:
    if k.shape != v.shape or q.shape[::3] != k.shape[::3] or rows.shape[-1] != q.shape[2]:
        raise ValueError(
            "q must be [batch, heads, rows, dim], k and v [batch, groups, tokens, dim]: "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)} and {rows.shape[-1]} row indices"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads cannot share {k.shape[1]} groups of keys: use a multiple")
    known = rows.device.type == "cpu" and rows.numel()  # on a GPU, checking would synchronize
    if known and (rows.min() < 0 or rows.max() >= k.shape[2] or (rows.diff() < 0).any()):
        raise ValueError(f"rows must ascend within 0 to {k.shape[2] - 1}, not {rows.tolist()[:8]}...: sort them")


@dispatch.register("row_attention", "portable")
def portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    with_lse: bool = False,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and, with `with_lse`, LSE in plain PyTorch, one slice of rows at a time.

    The heads of a group are stacked as more rows.
    """
    share = q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (-1, share))  # [batch, groups, share, chosen, dim]
    out, lses = torch.empty_like(q), list[Tensor]()
    if not out.numel():
        return out, out[..., 0]
    parts = rows.split(SLICE, -1), grouped.split(SLICE, 3), out.split(SLICE, 2)
    ends = (rows if last is None else last).split(SLICE, -1)
    for some, part, written, seen in zip(*parts, ends, strict=True):
        end = int(seen.max()) + 1 if some.device.type == "cpu" else k.shape[2]  # on a GPU, it would synchronize
        mask = visible(some, end, window, seen).repeat(*[1] * (some.ndim - 1), share, 1)
        mask = mask[:, None] if some.ndim == 2 else mask
        keys, values = k[:, :, :end], v[:, :, :end]
        if sinks is not None:  # a key of zeros, whose logit comes from the mask
            logits = sinks.view(-1, share, 1).expand(-1, -1, some.shape[-1]).flatten(1)[..., None]
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            bias = bias.expand(len(mask) if some.ndim == 2 else 1, k.shape[1], -1, -1)
            mask = torch.cat([bias, logits.to(q.dtype).expand(len(bias), -1, -1, -1)], -1)
            keys, values = (pad(x, (0, 0, 0, 1)) for x in (keys, values))
        attended = scaled_dot_product_attention(part.flatten(2, 3), keys, values, attn_mask=mask, scale=scale)
        written.copy_(attended.unflatten(2, (share, -1)).flatten(1, 2))
        if with_lse:
            scores = (scale * part.flatten(2, 3) @ keys.mT).masked_fill_(~mask, -torch.inf)
            lses.append(scores.logsumexp(-1).unflatten(2, (share, -1)).flatten(1, 2))
    return out, torch.cat(lses, 2) if with_lse else out[..., 0]


def visible(
    rows: Int[Tensor, "*batch chosen"],
    end: int,
    window: int | None,
    last: Int[Tensor, "*batch chosen"] | None = None,
) -> Bool[Tensor, "*batch chosen end"]:
    """Causal mask of the first `end` keys: each row sees the keys up to its own, or up to `last` if given."""
    keys = torch.arange(end, device=rows.device)
    mask = keys <= (rows if last is None else last)[..., None]
    return mask if window is None else mask & (rows[..., None] - keys < window)


dispatch.register_kernels("row_attention", "rows")
