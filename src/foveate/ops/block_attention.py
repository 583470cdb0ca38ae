"""Attention over a block table.

The portable path below is the definition of the op and runs on any device. Query blocks that read the same keys form a
group, and groups of equal shape are packed into one call of `scaled_dot_product_attention`. A call packs at most half
of the keys, unless a single group reads more, so that memory stays linear in the number of tokens.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import dispatch
from foveate.ops.block_table import BlockTable
from foveate.utils.cache import WeakTensorCache, persistent

__all__ = ["block_attention"]


@overload
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, *, scale: float | None = None,
    return_lse: Literal[False] = ..., scatter: Tensor | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, *, scale: float | None = None,
    return_lse: Literal[True], scatter: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def block_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys head_dim"],
    table: BlockTable,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    scatter: Int[Tensor, "queries"] | None = None,
) -> (
    Float[Tensor, "batch heads queries head_dim"]
    | tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads queries"]]
):
    """Softmax attention in which every query block reads only the key blocks that the table lists for it.

    Differentiable once in q, k and v, also through the LSE. Works with `torch.compile(fullgraph=True)`: the table is
    data, so layers with tables of one shape share one graph.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table: The key blocks that each query block reads, from `block_table`.
        scale: Factor on q·k; ``head_dim ** -0.5`` if None.
        return_lse: Also return the per-query log-sum-exp, log(sum(exp(scale * q·k))), as float32 (float64 for
            float64). The portable path then writes scores to memory, in bounded pieces.
        scatter: Position of each query in the output: ``out[:, :, scatter[i]]`` is the result of query i. A
            permutation of the queries; None keeps their order. The LSE stays in the order of the queries.

    Returns:
        Output, in q's dtype and layout, and with `return_lse` the LSE. Queries of an empty list get zeros and -inf.

    Raises:
        ValueError: If shapes, dtypes or devices of q, k and v do not match, if their numbers of tokens do not match
            the table, if the scale is 0 or not finite, or if `scatter` does not have one entry for each query.

    Examples:
        >>> from foveate.ops.block_table import block_starts, block_table
        >>> q = k = v = torch.randn(1, 4, 1000, 64)
        >>> starts = block_starts(1000)
        >>> local = block_table([[i] for i in range(16)], starts)
        >>> block_attention(q, k, v, local).shape
        torch.Size([1, 4, 1000, 64])
    """
    if k.shape != v.shape or q.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3:] != k.shape[3:] or not q.shape[3]:
        raise ValueError(
            "q, k, v must be [batch, heads, tokens, head_dim] and may differ only in the tokens of q: "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            "q, k, v must share one dtype and device: "
            f"got {q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}"
        )
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not -inf < scale < inf or not scale:
        raise ValueError(f"scale must be finite and not 0, not {scale}: None is head_dim ** -0.5")
    if scatter is not None and scatter.shape != q.shape[2:3]:
        raise ValueError(f"scatter must name a position for each of {q.shape[2]} queries, not {list(scatter.shape)}")
    backend = dispatch.choose("block_attention", q.device, q.dtype, q.shape[3])
    out, lse = backend.run(q, k, v, table, scale, return_lse, scatter)
    return (out, lse) if return_lse else out


# --- the portable path -----------------------------------------------------------------------------------------------


@dispatch.register("block_attention", "portable")
def portable(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, scale: float, with_lse: bool, scatter: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`block_attention` by packed calls of PyTorch's attention. Without `with_lse` the returned LSE is empty."""
    out, lse = _forward(q, k, v, *table, scale, with_lse)
    return out if scatter is None else torch.empty_like(out).index_copy(2, scatter, out), lse


class _Call(NamedTuple):
    """One packed call: `groups` groups of equally many queries (`rows`) and equally many keys (`columns`)."""

    rows: slice | Tensor
    columns: slice | Tensor
    groups: int


@torch.library.custom_op("foveate::block_attention_portable", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), _lse_like(q, with_lse).fill_(-torch.inf)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # copy once: strided heads slow down every call
    calls = _calls(BlockTable(query_starts, key_starts, offsets, keys), q, k)
    with torch.autocast(q.device.type, enabled=False):
        for rows, columns, groups in calls:
            q_part, k_part, v_part = _take(q, rows, groups), _take(k, columns, groups), _take(v, columns, groups)
            if not with_lse:
                _put(out, rows, scaled_dot_product_attention(q_part, k_part, v_part, scale=scale))
                continue
            out_part, lse_part = torch.empty_like(q_part), _lse_like(q_part)
            for piece in _pieces(q_part, k_part, q):
                scores = _scores(q_part[:, :, piece], k_part, scale)
                lse_part[:, :, piece] = scores.logsumexp(-1)
                out_part[:, :, piece] = (scores.softmax(-1) @ v_part.to(scores.dtype)).to(q.dtype)
            _put(out, rows, out_part)
            _put(lse[..., None], rows, lse_part[..., None])
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _lse_like(q, bool(args[-1]))


@torch.library.custom_op("foveate::block_attention_portable_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(x, dtype=_accumulator(x)) for x in (k, v))
    calls = _calls(BlockTable(query_starts, key_starts, offsets, keys), q, k)
    with torch.autocast(q.device.type, enabled=False):
        for rows, columns, groups in calls:
            q_part, g_part = (_take(x, rows, groups).to(dk.dtype) for x in (q, grad_out))
            k_part, v_part = (_take(x, columns, groups).to(dk.dtype) for x in (k, v))
            dq_part, dk_part, dv_part = (torch.zeros_like(x) for x in (q_part, k_part, v_part))
            for piece in _pieces(q_part, k_part, q):
                p = _scores(q_part[:, :, piece], k_part, scale).softmax(-1)
                ds = g_part[:, :, piece] @ v_part.mT
                ds -= (ds * p).sum(-1, keepdim=True)
                if grad_lse is not None:
                    ds += _take(grad_lse[..., None], rows, groups)[:, :, piece]
                ds *= p * scale
                dq_part[:, :, piece] = ds @ k_part
                dk_part += ds.mT @ q_part[:, :, piece]
                dv_part += p.mT @ g_part[:, :, piece]
            _put(dq, rows, dq_part.to(dq.dtype))
            _add(dk, columns, dk_part)
            _add(dv, columns, dv_part)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scale, ctx.with_lse = inputs[7:]


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad_out, grad_lse if ctx.with_lse else None, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _lse_like(q: Tensor, wanted: bool = True) -> Tensor:
    return q.new_empty(q.shape[:3] if wanted else (0,), dtype=_accumulator(q))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q.to(_accumulator(q)) * scale) @ k.to(_accumulator(k)).mT


def _pieces(q_part: Tensor, k_part: Tensor, q: Tensor) -> Iterator[slice]:
    """Slices of rows whose scores take at most a quarter of the memory of `q`, so that memory stays linear."""
    step = max(1, q.numel() // (4 * q_part.shape[0] * q_part.shape[1] * k_part.shape[2]))
    return (slice(start, start + step) for start in range(0, q_part.shape[2], step))


def _take(x: Tensor, where: slice | Tensor, groups: int) -> Tensor:
    """Some tokens of x as [batch, heads * groups, tokens of a group, dim]; a view if possible."""
    part = x[:, :, where] if isinstance(where, slice) else x.index_select(2, where)
    return part.reshape(x.shape[0], x.shape[1] * groups, -1, x.shape[3])


def _put(x: Tensor, where: slice | Tensor, part: Tensor) -> None:
    """Write a part to the tokens that `_take` reads."""
    part = part.reshape(*x.shape[:2], -1, x.shape[3])
    if isinstance(where, slice):
        x[:, :, where] = part
    else:
        x.index_copy_(2, where, part)


def _add(x: Tensor, where: slice | Tensor, part: Tensor) -> None:
    """Add a part to the tokens that `_take` reads; tokens may repeat."""
    part = part.reshape(*x.shape[:2], -1, x.shape[3])
    if isinstance(where, slice):
        x[:, :, where] += part
    else:
        x.index_add_(2, where, part)


_CALLS: WeakTensorCache[list[_Call]] = WeakTensorCache()  # reading the lists takes longer than a short call


def _calls(table: BlockTable, q: Tensor, k: Tensor) -> list[_Call]:
    """Packed calls that cover the table, cached."""
    table.check(q, k)
    if not q.numel():
        return []
    return _CALLS.get(table, q.device, lambda: _plan_calls(table, q.device))


@persistent
def _plan_calls(table: BlockTable, device: torch.device) -> list[_Call]:
    queries_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for query, keys in enumerate(table.lists()):
        queries_of[tuple(keys)].append(query)
    query_tokens, key_tokens = (torch.arange(int(starts[-1])).split(starts.diff().tolist()) for starts in table[:2])
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for keys, queries in queries_of.items():
        rows = torch.cat([query_tokens[i] for i in queries])
        columns = torch.cat([key_tokens[i] for i in keys]) if keys else rows[:0]
        if len(rows) and len(columns):
            by_shape[len(rows), len(columns)].append((rows, columns))
    calls: list[_Call] = []
    for (_, n_columns), groups in by_shape.items():
        size = max(1, table.key_tokens // 2 // n_columns)
        for i in range(0, len(groups), size):
            rows, columns = (torch.cat(part) for part in zip(*groups[i : i + size], strict=True))
            calls.append(_Call(_where(rows, device), _where(columns, device), len(groups[i : i + size])))
    return calls


def _where(tokens: Tensor, device: torch.device) -> slice | Tensor:
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if (tokens.diff() == 1).all() else tokens.to(device)


dispatch.register_kernels("block_attention", "block")
