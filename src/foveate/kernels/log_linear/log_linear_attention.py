# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention on NVIDIA GPUs: pooling, selection, and attention as a differentiable custom op."""

from typing import Any

import torch
from torch import Tensor

from foveate.kernels.launch import differentiable, empty_lse, gpu_op, row_contiguous
from foveate.kernels.log_linear.backward import backward_keys, backward_queries
from foveate.kernels.log_linear.forward import Keys, forward
from foveate.kernels.log_linear.pooling import level_sizes, pool
from foveate.kernels.log_linear.select_blocks import pick_nodes, readers_of, supports

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
    means, counts, logs = pool([x.detach() for x in ((k, v) if lists else (q, k, v))], real, block, levels)
    lists = [x.contiguous() for x in lists or pick_nodes(means, counts, tokens, block, levels, top_k)]
    settings = options.enriched, options.reweight, options.exclude_selected, options.full, options.scale
    out, lse = _attend(q, k, v, extra_k, extra_v, means, counts, logs, lists, real, block, top_k, *settings)
    return out, lse, lists, counts.split(level_sizes(tokens, block, levels), 1)


@gpu_op("log_linear_attention")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor, extra_v: Tensor, means: Tensor, counts: Tensor, logs: Tensor,
    lists: list[Tensor], real: Tensor | None,
    block: int, top_k: int, enriched: int, reweight: bool, exclude: bool, full: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and LSE. The last two tensors of `means` are the means of k and v; their gradients go to k and v."""
    keys = Keys(
        k, v, extra_k, extra_v, means, counts, logs, lists, real,
        block, top_k, enriched, reweight, exclude, full, scale,
    )  # fmt: skip
    return forward(q, keys)


@torch.library.register_fake(_attend)
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), empty_lse(q)


@gpu_op("log_linear_attention_backward")
def _backward(
    grads: list[Tensor], results: list[Tensor], tensors: list[Tensor], lists: list[Tensor], real: Tensor | None,
    block: int, top_k: int, enriched: int, reweight: bool, exclude: bool, full: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, extra_k and extra_v. `tensors` are the first arguments of `_attend`."""
    q, *tensors = tensors
    keys = Keys(*tensors, lists, real, block, top_k, enriched, reweight, exclude, full, scale)
    grad_out, grad_lse = row_contiguous(grads[0]), grads[1].contiguous()
    dq, binary, delta = backward_queries(q, keys, *results, grad_out, grad_lse)
    return dq, *backward_keys(q, keys, binary, delta, grad_out, readers_of(lists[: enriched + 1]))


@torch.library.register_fake(_backward)
def _(grads: list[Tensor], results: list[Tensor], tensors: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in tensors[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists, real = inputs[:10]
    ctx.options = inputs[10:]
    ctx.save_for_backward(*output, *tensors, real, *lists)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    out, lse, *saved = ctx.saved_tensors
    tensors, real, lists = saved[:8], saved[8], saved[9:]
    found = _backward(list(grads), [out, lse], tensors, lists, real, *ctx.options)
    return *found, None, None, None, [None] * len(lists), None, *[None] * len(ctx.options)


differentiable(_attend, _save, _differentiate)


BACKENDS = {"triton": (supports, log_linear_attention)}
