# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention on NVIDIA GPUs: pooling, selection, and attention as one differentiable custom op."""

from typing import Any

import torch
from torch import Tensor

from foveate.kernels.launch import call, differentiable, empty_like, empty_lse, gpu_op, recorded, row_contiguous
from foveate.kernels.log_linear.backward import backward_keys, backward_queries, list_readers
from foveate.kernels.log_linear.forward import Keys, forward
from foveate.kernels.log_linear.pooling import empty_means, level_sizes, level_starts, pool
from foveate.kernels.log_linear.select_blocks import empty_lists, pick_nodes, supports

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
    extra_k, extra_v = (None if x is None else row_contiguous(x) for x in (extra_k, extra_v))
    real = None if real is None else real.contiguous()
    given = [] if lists is None else [x.contiguous() for x in lists]
    sizes = options.block_size, options.levels, options.top_k
    settings = options.enriched, options.reweight, options.exclude_selected, options.full, options.scale
    out, lse, _, counts, _, *chosen = call(_attend, q, k, v, extra_k, extra_v, real, given, *sizes, *settings)
    return out, lse, given or chosen, counts.split(level_sizes(q.shape[2], *sizes[:2]), 1)


@gpu_op("log_linear_attention")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None, extra_v: Tensor | None, real: Tensor | None,
    lists: list[Tensor], block: int, levels: int, top_k: int,
    enriched: int, reweight: bool, exclude: bool, full: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Output, and the results of `attend_into`. Gradients do not flow through the picks."""
    out = empty_like(q)
    settings = block, levels, top_k, enriched, reweight, exclude, full, scale
    return [out, *attend_into(out, None, q, k, v, extra_k, extra_v, real, lists, *settings)]


@recorded
def attend_into(
    out: Tensor, scatter: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None,
    extra_v: Tensor | None, real: Tensor | None, lists: list[Tensor], block: int, levels: int, top_k: int,
    enriched: int, reweight: bool, exclude: bool, full: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Write the output to the rows of `out`, in order or where `scatter` says.

    Returns:
        LSE, the results of `pool`, and the lists unless given. The last means are the means of k and v.
    """
    pooled = pool([k, v] if lists else [q, k, v], real, block, levels)
    chosen = [] if lists else pick_nodes(*pooled[:2], q.shape[2], block, levels, top_k)
    extras = _or_nothing(k, extra_k, extra_v)
    settings = block, top_k, enriched, reweight, exclude, full, scale
    lse = forward(q, Keys(k, v, *extras, *pooled, lists or chosen, real, *settings), out, scatter)
    return [lse, *pooled, *chosen]


@torch.library.register_fake(_attend)
def _(
    q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None, extra_v: Tensor | None, real: Tensor | None,
    lists: list[Tensor], block: int, levels: int, top_k: int, *settings: Any,
) -> list[Tensor]:  # fmt: skip
    pooled = empty_means([k, v] if lists else [q, k, v], real, level_starts(q.shape[2], block, levels)[-1])
    chosen = [] if lists else empty_lists(q, q.shape[2], block, levels, top_k)
    return [empty_like(q), empty_lse(q), *pooled, *chosen]


def _or_nothing(k: Tensor, extra_k: Tensor | None, extra_v: Tensor | None) -> tuple[Tensor, Tensor]:
    """Extra keys and values, or none."""
    if extra_k is None or extra_v is None:
        extra_k = extra_v = k.new_empty(*k.shape[:2], 0, k.shape[3])
    return extra_k, extra_v


@gpu_op("log_linear_attention_backward")
@recorded
def _backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None,
    extra_v: Tensor | None, real: Tensor | None, out: Tensor, lse: Tensor, pooled: list[Tensor], lists: list[Tensor],
    block: int, top_k: int, enriched: int, reweight: bool, exclude: bool, full: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of the extra keys and values if any."""
    settings = block, top_k, enriched, reweight, exclude, full, scale
    keys = Keys(k, v, *_or_nothing(k, extra_k, extra_v), *pooled, lists, real, *settings)
    dq, binary, delta = backward_queries(q, keys, out, lse, grad_out, grad_lse)
    grads = [dq, *backward_keys(q, keys, binary, delta, grad_out, list_readers(keys))]
    return grads[:3] if extra_k is None else grads


@torch.library.register_fake(_backward)
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extra_k: Tensor | None,
    extra_v: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    return [empty_like(x) for x in (q, k, v, extra_k, extra_v) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, lists, block, _, top_k = inputs[:10]
    ctx.settings = block, top_k, *inputs[10:]
    ctx.chosen = len(output) - 5
    ctx.save_for_backward(*tensors, *output[:5], *(lists or output[5:]))
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors[:8]
    pooled, lists = list(ctx.saved_tensors[8:11]), list(ctx.saved_tensors[11:])
    grad_out = torch.zeros_like(out) if grad_out is None else row_contiguous(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grads = call(_backward, grad_out, grad_lse, *tensors, out, lse, pooled, lists, *ctx.settings)
    given = 0 if ctx.chosen else len(lists)
    return *grads, *[None] * (5 - len(grads)), None, [None] * given, *[None] * (1 + len(ctx.settings))


differentiable(_attend, _save, _differentiate)


BACKENDS = {"triton": (supports, log_linear_attention)}
