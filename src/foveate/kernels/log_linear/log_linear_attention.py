# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention on NVIDIA GPUs as custom ops: forward and backward."""

from typing import Any

import torch
from torch import Tensor

from foveate.kernels.block.block_attention import side_by_side
from foveate.kernels.gpu_op import gpu_op
from foveate.kernels.log_linear import log_linear_queries, selection
from foveate.kernels.log_linear.hierarchical_pooling import Means
from foveate.kernels.log_linear.log_linear_keys import backward_keys
from foveate.kernels.log_linear.log_linear_queries import Keys
from foveate.kernels.log_linear.select_blocks import by_level, packed, pick_nodes, pool_levels, takes

__all__ = ["log_linear_attention"]


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
    q, k, v, real = side_by_side(q), side_by_side(k), side_by_side(v), packed(real)
    nothing = k.new_empty(*k.shape[:2], 0, k.shape[3])  # not a part of k: it would send k a gradient of zeros
    extra_k, extra_v = (nothing if x is None else side_by_side(x) for x in (extra_k, extra_v))
    tokens, block, levels = q.shape[2], options.block_size, options.levels
    given = [x.detach() for x in ((k, v) if lists else (q, k, v))]
    means, counts, logs = pool_levels(given, real, block, levels)
    chosen = [x.contiguous() for x in lists or pick_nodes(means, counts, tokens, block, levels, options.top_k)]
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
        options.full,
    )
    return out, lse, chosen, by_level(counts, tokens, block, levels)


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
    """Output and LSE. The last of the means are those of k and v, which get their gradients."""
    keys = Keys(k, v, extra_k, extra_v, Means(means, counts, logs), lists, real, block, top_k, enriched,
                reweight, exclude, scale, full)  # fmt: skip
    return log_linear_queries.forward(q, keys)


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    grad_out = side_by_side(grad_out)
    dq, *numbers = log_linear_queries.backward_queries(q, keys, out, lse, grad_out, grad_lse.contiguous())
    return dq, *backward_keys(q, keys, *numbers, grad_out, selection.readers_of(lists[: enriched + 1]))


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists, real, block, top_k, enriched, reweight, exclude, scale, full = inputs
    ctx.options = block, top_k, enriched, reweight, exclude, scale, full
    ctx.save_for_backward(*output, *tensors, real, *lists)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    given, real, lists = tensors[:8], tensors[8], tensors[9:]
    grads = _backward(grad_out, grad_lse, out, lse, *given, lists, real, *ctx.options)
    return *grads, None, None, None, [None] * len(lists), None, *[None] * len(ctx.options)


_attend.register_autograd(_differentiate, setup_context=_save)


BACKENDS = {"triton": (takes, log_linear_attention)}
