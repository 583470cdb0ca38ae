# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Products of small matrices with regions of tokens in one launch: each token is read and written once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import (
    Launch,
    differentiable,
    gpu_op,
    half_precision,
    launcher,
    padded_size,
    row_contiguous,
)

__all__ = ["BACKENDS", "region_matmul"]

LARGEST = 64  # tokens of a region
CHANNELS, WARPS = 128, 4


@triton.jit
def _multiply(
    p_w, p_x, p_order, p_y, regions, rows, tokens, dim, text, s_wp, s_wr, s_wm, s_wt, s_xb, s_x, s_yb, s_y,
    M: tl.constexpr, T: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Multiply one region, or copy M of the text tokens before the regions, in BC channels."""
    copies = tl.cdiv(text, M)
    place, sample = tl.program_id(0) % (copies + regions), tl.program_id(0) // (copies + regions)
    o_m, o_t, o_c = tl.arange(0, M), tl.arange(0, T), tl.program_id(1) * BC + tl.arange(0, BC)
    p_x += sample.to(tl.int64) * s_xb + o_c[None, :]
    p_y += sample.to(tl.int64) * s_yb + o_c[None, :]
    m_c = (o_c < dim)[None, :]
    if place < copies:
        o_n = place * M + o_m
        m_n = (o_n < text)[:, None] & m_c
        o_from = tl.load(p_order + o_n, mask=o_n < text, other=0) if p_order is not None else o_n
        x = tl.load(p_x + o_from[:, None].to(tl.int64) * s_x, mask=m_n)
        tl.store(p_y + o_n[:, None].to(tl.int64) * s_y, x, mask=m_n)
    else:
        region = place - copies
        m_m, m_t = (o_m < rows)[:, None], (o_t < tokens)[:, None]
        p_w += sample.to(tl.int64) * s_wp + region.to(tl.int64) * s_wr
        w = tl.load(p_w + o_m[:, None] * s_wm + o_t[None, :] * s_wt, mask=m_m & (o_t < tokens)[None, :], other=0.0)
        o_x = text + region * tokens + o_t
        if p_order is not None:
            o_x = tl.load(p_order + o_x, mask=o_t < tokens, other=0)
        y = tl.dot(w, tl.load(p_x + o_x[:, None].to(tl.int64) * s_x, mask=m_t & m_c, other=0.0))  # [M, BC]
        o_y = (text + region * rows + o_m)[:, None].to(tl.int64)
        tl.store(p_y + o_y * s_y, y.to(p_y.dtype.element_ty), mask=m_m & m_c)


def supports(device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
    """Whether the kernel runs: an NVIDIA GPU, half precision, regions of at most 64 tokens."""
    return device.type == "cuda" and half_precision(dtype) and tokens <= LARGEST


@gpu_op("region_matmul")
def region_matmul(weights: Tensor, x: Tensor, text: int, order: Tensor | None = None) -> Tensor:
    """`foveate.ops.region_matmul` on a GPU."""
    x = row_contiguous(x)
    _, regions, _, tokens = weights.shape
    length = x.shape[1] if order is None else len(order)
    if length != text + regions * tokens:
        raise ValueError(f"x has {length} tokens, not {text} text tokens and {regions} regions of {tokens}")
    y = _like(weights, x, text)
    _launch(weights, x, order, y, text)
    return y


@launcher
def _launch(weights: Tensor, x: Tensor, order: Tensor | None, y: Tensor, text: int) -> Launch:
    (plans, regions, rows, tokens), (batch, _, dim) = weights.shape, x.shape
    m, t = padded_size(rows), padded_size(tokens)
    w_strides = 0 if plans == 1 else weights.stride(0), *weights.stride()[1:]
    args = weights, x, order, y, regions, rows, tokens, dim, text, *w_strides, *x.stride()[:2], *y.stride()[:2]
    grid = batch * (triton.cdiv(text, m) + regions), triton.cdiv(dim, CHANNELS)
    return Launch(_multiply, grid, args, {"M": m, "T": t, "BC": CHANNELS, "num_warps": WARPS})


@torch.library.register_fake(region_matmul)
def _like(weights: Tensor, x: Tensor, text: int, order: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], text + weights.shape[1] * weights.shape[2], x.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, x, ctx.text, order = inputs
    ctx.save_for_backward(weights, x, order)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, x, order = ctx.saved_tensors
    dw = dx = None
    if weights.requires_grad:
        ordered = x if order is None else x.index_select(1, order)
        dy, regions = (part[:, ctx.text :].unflatten(1, (weights.shape[1], -1)) for part in (grad, ordered))
        dw = (dy @ regions.mT).sum_to_size(weights.shape)
    if x.requires_grad:
        dx = region_matmul(weights.mT, grad, ctx.text)
        dx = dx if order is None else torch.zeros_like(x).index_add_(1, order, dx)
    return dw, dx, None, None


differentiable(region_matmul, _save, _differentiate)


BACKENDS = {"triton": (supports, region_matmul)}
