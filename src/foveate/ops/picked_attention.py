"""One softmax over picked blocks and shared keys: the core of the portable path of log-linear attention.

Scores are computed for a few runs of queries at a time; the backward pass recomputes them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foveate.ops.picked_keys import layout_of, pieces, tables_of

__all__ = ["picked_attention"]


@torch.library.custom_op("foveate::picked_attention", mutates_args=())
def picked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_k: Tensor,
    shared_v: Tensor,
    shared_bias: Tensor,
    real: Tensor | None,
    lists: list[Tensor],
    block: int,
    enriched: int,
    exclude: bool,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of every query. Differentiable once in q, k, v, shared_k and shared_v.

    Values may have fewer channels than keys. A query that sees no key gets zeros and an LSE of -inf.

    Args:
        q: Queries [batch, heads, tokens, dim].
        k: Keys.
        v: Values.
        shared_k: Means of `enriched` levels, the finest first, then extra keys that all queries see.
        shared_v: Values of the shared keys.
        shared_bias: Bias of their scores [1 or batch, shared], float32 or wider; -inf hides a key from all queries.
        real: Bool [batch, tokens], False for padding, which no query sees.
        lists: Lists of a `Selection`.
        block: Tokens of a block.
        enriched: Number of levels whose means are among the shared keys.
        exclude: Whether to hide from queries the means of nodes that their ancestors picked.
        scale: Factor on q·k.
        deterministic: Whether to add gradients of keys in a fixed order.
    """
    layout = layout_of(q, shared_k, lists, block, enriched)
    tables = tables_of(k, v, shared_k, shared_v, shared_bias, real, layout)
    queries = layout.runs_of(q)
    lse = queries.new_empty(*queries.shape[:2], 1, dtype=shared_bias.dtype)
    out = v.new_empty(*queries.shape[:2], v.shape[3])
    with torch.autocast(q.device.type, enabled=False):
        for piece, reads in pieces(tables, lists, layout, exclude):
            q_part = queries[piece].to(lse.dtype)
            scores = [read.scores(q_part, scale) for read in reads]
            top = _per_run((part.amax(-1) for part in scores), q_part).amax(0)
            top = top.clamp(min=torch.finfo(top.dtype).min)  # finite even where no key is seen
            weights = [part.sub_(read.cut(top)).exp_() for part, read in zip(scores, reads, strict=True)]
            total = _per_run((part.sum(-1) for part in weights), q_part).sum(0)
            mixed = _per_run((part @ read.v for part, read in zip(weights, reads, strict=True)), q_part).sum(0)
            out[piece] = mixed / total.clamp(min=torch.finfo(total.dtype).tiny)
            lse[piece] = top + total.log()
    return _to_tokens(out, v), lse.view(*q.shape[:2], -1)[:, :, : q.shape[2]].contiguous()


@picked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, bias: Tensor, *args: object) -> Any:
    return torch.empty_like(v), q.new_empty(q.shape[:3], dtype=bias.dtype)


@torch.library.custom_op("foveate::picked_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_k: Tensor,
    shared_v: Tensor,
    shared_bias: Tensor,
    real: Tensor | None,
    lists: list[Tensor],
    block: int,
    enriched: int,
    exclude: bool,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = layout_of(q, shared_k, lists, block, enriched)
    tables = tables_of(k, v, shared_k, shared_v, shared_bias, real, layout)
    sums = [[torch.zeros_like(x, dtype=lse.dtype).flatten(1) for x in (table.k, table.v)] for table in tables]
    queries, grads = layout.runs_of(q), layout.runs_of(grad_out)
    lse = lse.where(lse.isfinite(), 0)  # where no key is seen, all weights are 0
    lse, grad_lse = (layout.runs_of(x[..., None]) for x in (lse, grad_lse))
    dq = torch.empty_like(queries)
    with torch.autocast(q.device.type, enabled=False):
        for piece, reads in pieces(tables, lists, layout, exclude):
            q_part, g_part = queries[piece].to(lse.dtype), grads[piece].to(lse.dtype)
            weights = [read.scores(q_part, scale).sub_(read.cut(lse[piece])).exp_() for read in reads]
            ds = [read.cut(g_part) @ read.v.mT for read in reads]
            mean = _per_run(((p * d).sum(-1) for p, d in zip(weights, ds, strict=True)), q_part).sum(0)
            mean -= grad_lse[piece]
            for p, d, read, (dk, dv) in zip(weights, ds, reads, sums, strict=True):
                d.sub_(read.cut(mean)).mul_(p).mul_(scale)
                _add(dk, read.rows, d.mT @ read.cut(q_part), deterministic)
                _add(dv, read.rows, p.mT @ read.cut(g_part), deterministic)
            dq[piece] = _per_run((d @ read.k for d, read in zip(ds, reads, strict=True)), q_part).sum(0)
    (dk, dv), (dshared_k, dshared_v) = sums
    pairs = (dq, q), (dk, k), (dv, v), (dshared_k, shared_k), (dshared_v, shared_v)
    return tuple(_to_tokens(grad, x) for grad, x in pairs)  # pyright: ignore[reportReturnType]


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, lse: Tensor, *args: Any) -> Any:
    return tuple(torch.empty_like(x) for x in args[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists, ctx.block, ctx.enriched, ctx.exclude, ctx.scale, ctx.deterministic = inputs
    ctx.save_for_backward(output[1], *tensors, *lists)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    lse, q, k, v, shared_k, shared_v, bias, real, *lists = ctx.saved_tensors
    options = ctx.block, ctx.enriched, ctx.exclude, ctx.scale, ctx.deterministic
    grads = _backward(grad_out, grad_lse, lse, q, k, v, shared_k, shared_v, bias, real, lists, *options)
    return *grads, None, None, [None] * len(lists), *[None] * len(options)


picked_attention.register_autograd(_differentiate, setup_context=_save)


def _per_run(parts: Iterable[Tensor], q: Tensor) -> Tensor:
    """Results for picked blocks and for shared keys, stacked per run: [2, runs, queries, channels]."""
    return torch.stack([part.reshape(*q.shape[:2], -1) for part in parts])


def _to_tokens(x: Tensor, like: Tensor) -> Tensor:
    """Runs, or rows of a table, as [batch, heads, tokens, dim] without padding."""
    return torch.empty_like(like).copy_(x.view(*like.shape[:2], -1, like.shape[3])[:, :, : like.shape[2]])


def _add(table: Tensor, rows: Tensor, part: Tensor, deterministic: bool) -> None:
    """Add to rows of a table; row indices may repeat."""
    part = part.reshape(-1, table.shape[1])
    if deterministic and table.is_cuda:
        table.index_put_((rows.flatten(),), part, accumulate=True)  # sorts first; index_add_ adds in any order
    else:
        table.index_add_(0, rows.flatten(), part)
