# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention over [text | image] on NVIDIA GPUs, as one differentiable custom op.

Block attention computes what reads the text, and the queries of the text. Log-linear attention goes on from its output
and LSE in the rows of the image.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foveate.kernels.block import block_attention
from foveate.kernels.launch import call, differentiable, empty_like, empty_lse, gpu_op, row_contiguous
from foveate.kernels.log_linear.log_linear_attention import attend_into, differentiate_into
from foveate.kernels.log_linear.pooling import empty_means, level_starts
from foveate.kernels.log_linear.select_blocks import empty_lists, supports
from foveate.ops.block_table import BlockTable, block_table

__all__ = ["BACKENDS", "joint_log_linear_attention"]


def joint_log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, image: int, scatter: Tensor | None, options: Any
) -> Tensor:
    """Output of `foveate.ops.joint_attention` for a log-linear pattern of the last `image` tokens."""
    q, k, v = map(row_contiguous, (q, k, v))
    settings = options.enriched, options.reweight, options.exclude_selected, options.scale
    return call(_attend, q, k, v, scatter, image, options.block_size, options.levels, options.top_k, *settings)[0]


@gpu_op("joint_log_linear_attention")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scatter: Tensor | None, image: int, block: int, levels: int, top_k: int,
    enriched: int, reweight: bool, exclude: bool, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Output, LSE, and the results of `attend_into` for the image."""
    text, begun = q.shape[2] - image, k.shape[2] > image
    if begun:
        table = _with_text(text, k.shape[2] - image, image)
        out, lse = block_attention.attend(q, k, v, table, scatter, scale, block_attention.kernels_for(q))
    else:
        out, lse = empty_like(q), empty_lse(q)
    rows, place = (out[:, :, text:], None) if scatter is None else (out, scatter[text:])
    images = (x[:, :, -image:] for x in (q, k, v))
    settings = block, levels, top_k, enriched, reweight, exclude, True, scale
    return [out, lse, *attend_into(rows, lse[:, :, text:], begun, place, *images, None, [], *settings)]


@torch.library.register_fake(_attend)
def _(
    q: Tensor, k: Tensor, v: Tensor, scatter: Tensor | None, image: int, block: int, levels: int, top_k: int,
    *settings: Any,
) -> list[Tensor]:  # fmt: skip
    images = [x[:, :, -image:] for x in (q, k, v)]
    pooled = empty_means(images, None, level_starts(image, block, levels)[-1])
    return [empty_like(q), empty_lse(q), *pooled, *empty_lists(images[0], image, block, levels, top_k)]


@gpu_op("joint_log_linear_attention_backward")
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scatter: Tensor | None, out: Tensor, lse: Tensor,
    pooled: list[Tensor], lists: list[Tensor], image: int, block: int, top_k: int, enriched: int, reweight: bool,
    exclude: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if scatter is not None:
        out, grad_out = (x.index_select(2, scatter) for x in (out, grad_out))
    text, begun = q.shape[2] - image, k.shape[2] > image
    if begun:
        table = _with_text(text, k.shape[2] - image, image)
        dq, dk, dv = block_attention.differentiate(
            grad_out, None, q, k, v, out, lse, table, scale, block_attention.kernels_for(q)
        )
    else:
        dq, dk, dv = empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    images = [x[:, :, -image:] for x in (dq, row_contiguous(grad_out), q, k, v, out, lse)]
    settings = block, top_k, enriched, reweight, exclude, True, scale
    of_image = differentiate_into(
        images[0], begun, images[1], None, *images[2:5], None, *images[5:], pooled, lists, *settings
    )
    for total, grad in zip((dk, dv), of_image, strict=True):
        total[:, :, -image:] += grad
    return dq, dk, dv


@torch.library.register_fake(_backward)
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, scatter, image, block, _, *settings = inputs
    ctx.settings = image, block, *settings
    ctx.save_for_backward(q, k, v, scatter, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, scatter, out, lse, *rest = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    inputs = grad_out, q, k, v, scatter, out, lse, rest[:3], rest[3:]
    return *call(_backward, *inputs, *ctx.settings), *[None] * (2 + len(ctx.settings))


differentiable(_attend, _save, _differentiate)


@lru_cache(64)
def _with_text(queries: int, text: int, image: int) -> BlockTable:
    """Table in which queries of the text read everything, and queries of the image read the text."""
    starts = [0, queries, queries + image], [0, text, text + image]
    return block_table([[0, 1], [0]], *map(torch.tensor, starts))


BACKENDS = {"triton": (supports, joint_log_linear_attention)}
