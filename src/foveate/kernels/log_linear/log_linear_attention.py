# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention on NVIDIA GPUs: custom ops for forward and backward."""

from typing import Any

import torch
from torch import Tensor

from foveate.kernels.launch import empty_lse, gpu_op, row_contiguous
from foveate.kernels.log_linear import log_linear_queries, selection
from foveate.kernels.log_linear.hierarchical_pooling import Means
from foveate.kernels.log_linear.log_linear_keys import backward_keys
from foveate.kernels.log_linear.log_linear_queries import Keys
from foveate.kernels.log_linear.select_blocks import pick_nodes, pool_levels, split_levels, supports

__all__ = ["BACKENDS", "log_linear_attention"]


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
    """Output, LSE, lists and counts of `foveate.ops.log_linear_attention`."""
    q, k, v = map(row_contiguous, (q, k, v))
    real = None if real is None else real.contiguous()
    nothing = k.new_empty(*k.shape[:2], 0, k.shape[3])  # a slice of k would send k a gradient of zeros
    extra_k, extra_v = (nothing if x is None else row_contiguous(x) for x in (extra_k, extra_v))
    tokens, block, levels, top_k = q.shape[2], options.block_size, options.levels, options.top_k
    pooled = [x.detach() for x in ((k, v) if lists else (q, k, v))]
    means, counts, logs = pool_levels(pooled, real, block, levels)
    lists = [x.contiguous() for x in lists or pick_nodes(means, counts, tokens, block, levels, top_k)]
    settings = options.enriched, options.reweight, options.exclude_selected, options.scale, options.full
    out, lse = _attend(q, k, v, extra_k, extra_v, means, counts, logs, lists, real, block, top_k, *settings)
    return out, lse, lists, split_levels(counts, tokens, block, levels)


@gpu_op("foveate::log_linear_attention")
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
    full: bool,
) -> tuple[Tensor, Tensor]:
    """Output and LSE. The last two tensors of `means` are the means of k and v; their gradients go to k and v."""
    keys = Keys(k, v, extra_k, extra_v, Means(means, counts, logs), lists, real, block, top_k, enriched,
                reweight, exclude, scale, full)  # fmt: skip
    return log_linear_queries.forward(q, keys)


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), empty_lse(q)


@gpu_op("foveate::log_linear_attention_backward")
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
    full: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    keys = Keys(k, v, extra_k, extra_v, Means(means, counts, logs), lists, real, block, top_k, enriched,
                reweight, exclude, scale, full)  # fmt: skip
    grad_out = row_contiguous(grad_out)
    dq, *per_query = log_linear_queries.backward_queries(q, keys, out, lse, grad_out, grad_lse.contiguous())
    return dq, *backward_keys(q, keys, *per_query, grad_out, selection.readers_of(lists[: enriched + 1]))


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists, real, block, top_k, enriched, reweight, exclude, scale, full = inputs
    ctx.options = block, top_k, enriched, reweight, exclude, scale, full
    ctx.save_for_backward(*output, *tensors, real, *lists)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    inputs, real, lists = tensors[:8], tensors[8], tensors[9:]
    grads = _backward(grad_out, grad_lse, out, lse, *inputs, lists, real, *ctx.options)
    return *grads, None, None, None, [None] * len(lists), None, *[None] * len(ctx.options)


_attend.register_autograd(_differentiate, setup_context=_save)


BACKENDS = {"triton": (supports, log_linear_attention)}
