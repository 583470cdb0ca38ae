# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Log-linear attention over [text | image] on NVIDIA GPUs, as one differentiable custom op.

Text and image write to one output. The rows of the text are few, and are attention over a table of one block.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foveate.kernels.block import block_attention
from foveate.kernels.launch import call, differentiable, empty_like, empty_lse, gpu_op, row_contiguous
from foveate.kernels.log_linear.log_linear_attention import attend_into
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
    """Output, LSE of the text, and the results of `attend_into` for the image."""
    out, text = empty_like(q), q.shape[2] - image
    rows, place = out[:, :, text:], None
    if scatter is not None:
        rows, place = out, scatter[text:]
    images, words = zip(*(_parts(x, image) for x in (q, k, v)), strict=True)
    settings = block, levels, top_k, enriched, reweight, exclude, True, scale
    made = attend_into(rows, place, *images, *_extra(words), None, [], *settings)
    if not text:
        return [out, empty_lse(words[0]), *made]
    written, lse = torch.ops.foveate.block_attention(
        words[0], k, v, *_dense(text, k.shape[2]), None, scale, _kernels(q)
    )
    if scatter is None:
        out[:, :, :text] = written
    else:
        out.index_copy_(2, scatter[:text], written)
    return [out, lse, *made]


@torch.library.register_fake(_attend)
def _(
    q: Tensor, k: Tensor, v: Tensor, scatter: Tensor | None, image: int, block: int, levels: int, top_k: int,
    *settings: Any,
) -> list[Tensor]:  # fmt: skip
    images, words = zip(*(_parts(x, image) for x in (q, k, v)), strict=True)
    pooled = empty_means(list(images), None, level_starts(image, block, levels)[-1])
    chosen = empty_lists(images[0], image, block, levels, top_k)
    return [empty_like(q), empty_lse(words[0]), empty_lse(images[0]), *pooled, *chosen]


@gpu_op("joint_log_linear_attention_backward")
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scatter: Tensor | None, out: Tensor, text_lse: Tensor,
    lse: Tensor, pooled: list[Tensor], lists: list[Tensor], image: int, block: int, top_k: int, enriched: int,
    reweight: bool, exclude: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if scatter is not None:
        out, grad_out = (x.index_select(2, scatter) for x in (out, grad_out))
    text, extra = q.shape[2] - image, k.shape[2] - image
    images, words = zip(*(_parts(x, image) for x in (q, k, v, out, row_contiguous(grad_out))), strict=True)
    dq = empty_like(q)
    if text:
        table = _dense(text, k.shape[2])
        dq[:, :, :text], dk, dv = torch.ops.foveate.block_attention_backward(
            words[4], None, words[0], k, v, words[3], text_lse, *table, None, scale, _kernels(q)
        )
    else:
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    settings = block, top_k, enriched, reweight, exclude, True, scale
    grads = torch.ops.foveate.log_linear_attention_backward(
        images[4], None, *images[:3], *_extra(words), None, images[3], lse, pooled, lists, *settings
    )
    dq[:, :, text:] = grads[0]
    for total, of_image, of_text in zip((dk, dv), grads[1:3], grads[3:] or (None, None), strict=True):
        total[:, :, extra:] += of_image
        if of_text is not None:
            total[:, :, :extra] += of_text
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
    q, k, v, scatter, out, text_lse, lse, *rest = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    inputs = grad_out, q, k, v, scatter, out, text_lse, lse, rest[:3], rest[3:]
    return *call(_backward, *inputs, *ctx.settings), *[None] * (2 + len(ctx.settings))


differentiable(_attend, _save, _differentiate)


def _parts(x: Tensor, image: int) -> tuple[Tensor, Tensor]:
    """Rows of the image, and those of the text before them."""
    text = x.shape[2] - image
    return x[:, :, text:], x[:, :, :text]


def _extra(words: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values of the text, if any."""
    return (words[1], words[2]) if words[1].shape[2] else (None, None)


@lru_cache(64)
def _dense(queries: int, keys: int) -> BlockTable:
    return block_table([[0]], torch.tensor([0, queries]), torch.tensor([0, keys]))


def _kernels(q: Tensor) -> str:
    """Kernels of block attention for these queries."""
    names = [name for name, (runs, _) in block_attention.BACKENDS.items() if runs(q.device, q.dtype, q.shape[3])]
    return names[-1] if names else "triton"  # none in Triton's interpreter


BACKENDS = {"triton": (supports, joint_log_linear_attention)}
