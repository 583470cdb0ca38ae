# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention on NVIDIA GPUs as custom ops: pooling, picking, and attention forward and backward."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foveate.kernels import log_linear_queries, pyramid, selection
from foveate.kernels.log_linear_keys import backward_keys
from foveate.kernels.log_linear_queries import Keys

__all__ = ["log_linear_attention", "select_blocks"]

LARGEST_HEAD = 128  # those of 256 spill


def takes(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernels run there: an NVIDIA GPU of sm_80 or later, half precision, heads of at most 128."""
    half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda" and half and size <= LARGEST_HEAD and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def select_blocks(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """What `foveate.ops.select_blocks` defines: lists and counts."""
    means, counts, _ = _pool([_rows(q), _rows(k)], _dense(real), block, levels)
    return _pick(means, counts, q.shape[2], block, levels, top_k), _levels(counts, q.shape[2], block, levels)


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    real: Tensor | None,
    lists: list[Tensor] | None,
    options: Any,
) -> tuple[Tensor, Tensor, list[Tensor], tuple[Tensor, ...]]:
    """What `foveate.ops.log_linear_attention` defines: output, LSE, lists and counts."""
    q, k, v, real = _rows(q), _rows(k), _rows(v), _dense(real)
    extra_k, extra_v = (y[:, :, :0] if x is None else _rows(x) for x, y in ((extra_k, k), (extra_v, v)))
    tokens, block, levels = q.shape[2], options.block_size, options.levels
    given = [x.detach() for x in ((k, v) if lists else (q, k, v))]
    means, counts, logs = _pool(given, real, block, levels)
    chosen = lists or _pick(means, counts, tokens, block, levels, options.top_k)
    out, lse = _attend(
        q,
        k,
        v,
        extra_k,
        extra_v,
        means,
        counts,
        logs,
        chosen,
        real,
        block,
        options.top_k,
        options.enriched,
        options.reweight,
        options.exclude_selected,
        options.scale,
    )
    return out, lse, chosen, _levels(counts, tokens, block, levels)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(real: Tensor | None) -> Tensor | None:
    return None if real is None else real.contiguous()


def _levels(counts: Tensor, tokens: int, block: int, levels: int) -> tuple[Tensor, ...]:
    return counts.split([b - a for a, b in pairwise(pyramid.level_starts(tokens, block, levels))], 1)


@torch.library.custom_op("foveate::pool_levels", mutates_args=())
def _pool(tensors: list[Tensor], real: Tensor | None, block: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    return pyramid.pool(tensors, real, block, levels)


@_pool.register_fake
def _(tensors: list[Tensor], real: Tensor | None, block: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, dim = tensors[0].shape
    nodes = pyramid.level_starts(tokens, block, levels)[-1]
    counts = tensors[0].new_empty(1 if real is None else batch, nodes, dtype=torch.int32)
    means = tensors[0].new_empty(len(tensors), batch, heads, nodes, dim)
    return means, counts, torch.empty_like(counts, dtype=torch.float32)


@torch.library.custom_op("foveate::pick_nodes", mutates_args=())
def _pick(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    return selection.select(means[0], means[1], counts, tokens, block, levels, top_k)


@_pick.register_fake
def _(means: Tensor, counts: Tensor, tokens: int, block: int, levels: int, top_k: int) -> list[Tensor]:
    sizes = [b - a for a, b in pairwise(pyramid.level_starts(tokens, block, levels))]
    return [means.new_empty(*means.shape[1:3], nodes, min(top_k, nodes), dtype=torch.int32) for nodes in sizes]


@torch.library.custom_op("foveate::log_linear_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra_k: Tensor,
    extra_v: Tensor,
    means: Tensor,
    counts: Tensor,
    logs: Tensor,
    lists: list[Tensor],
    real: Tensor | None,
    block: int,
    top_k: int,
    enriched: int,
    reweight: bool,
    exclude: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and LSE. The last of the means are those of k and v, which get their gradients."""
    keys = Keys(k, v, extra_k, extra_v, pyramid.Means(means, counts, logs), lists, real, block, top_k, enriched,
                reweight, exclude, scale)  # fmt: skip
    return log_linear_queries.forward(q, keys)


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("foveate::log_linear_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra_k: Tensor,
    extra_v: Tensor,
    means: Tensor,
    counts: Tensor,
    logs: Tensor,
    lists: list[Tensor],
    real: Tensor | None,
    block: int,
    top_k: int,
    enriched: int,
    reweight: bool,
    exclude: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    keys = Keys(k, v, extra_k, extra_v, pyramid.Means(means, counts, logs), lists, real, block, top_k, enriched,
                reweight, exclude, scale)  # fmt: skip
    grad_out = _rows(grad_out)
    dq, delta = log_linear_queries.backward_queries(q, keys, out, lse, grad_out, grad_lse.contiguous())
    readers = [selection.readers_of(chosen) for chosen in lists[: enriched + 1]]
    return dq, *backward_keys(q, keys, lse, delta, grad_out, readers)


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists, real, block, top_k, enriched, reweight, exclude, scale = inputs
    ctx.options = block, top_k, enriched, reweight, exclude, scale
    ctx.save_for_backward(*output, *tensors, real, *lists)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    given, real, lists = tensors[:8], tensors[8], tensors[9:]
    grads = _backward(grad_out, grad_lse, out, lse, *given, lists, real, *ctx.options)
    return *grads, None, None, None, [None] * len(lists), None, *[None] * len(ctx.options)


_attend.register_autograd(_differentiate, setup_context=_save)


BACKENDS = {"triton": (takes, log_linear_attention)}
