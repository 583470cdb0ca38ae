# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""Unmerged changes added to all tokens, in one launch for each group of regions of one shape.

Each token is read and written once, whatever the order of the tokens. Only the sum is rounded, not the change.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, differentiable, gpu_op, launcher, padded_size, row_contiguous
from foveate.kernels.merging.region_matmul import region_matmul, supports

__all__ = ["BACKENDS", "region_update"]

CHANNELS, WARPS = 64, 4


@triton.jit
def _update(
    p_w, p_x, p_before, p_after, p_order, p_y, regions, rows, tokens, dim, first, place,
    s_wp, s_wr, s_wm, s_wt, s_xb, s_x, s_bb, s_b, s_ab, s_a, s_yb, s_y,
    M: tl.constexpr, T: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Update one region in BC channels; `first` merged tokens and `place` tokens come before its group."""
    region, sample = tl.program_id(0) % regions, (tl.program_id(0) // regions).to(tl.int64)
    o_m, o_t, o_c = tl.arange(0, M), tl.arange(0, T), tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = (o_c < dim)[None, :]
    m_m, m_t = (o_m < rows)[:, None] & m_c, (o_t < tokens)[:, None] & m_c
    o_n = place + region * rows + o_m
    if p_order is not None:
        o_n = tl.load(p_order + o_n, mask=o_m < rows, other=0)
    o_n = o_n[:, None].to(tl.int64)
    o_k = (first + region * tokens + o_t)[:, None].to(tl.int64)
    p_w += sample * s_wp + region.to(tl.int64) * s_wr
    m_w = (o_m < rows)[:, None] & (o_t < tokens)[None, :]
    w = tl.load(p_w + o_m[:, None] * s_wm + o_t[None, :] * s_wt, mask=m_w, other=0.0)
    before = tl.load(p_before + sample * s_bb + o_k * s_b + o_c[None, :], mask=m_t, other=0.0)
    after = tl.load(p_after + sample * s_ab + o_k * s_a + o_c[None, :], mask=m_t, other=0.0)
    x = tl.load(p_x + sample * s_xb + o_n * s_x + o_c[None, :], mask=m_m)
    change = (after.to(tl.float32) - before.to(tl.float32)).to(w.dtype)  # [T, BC]
    y = x.to(tl.float32) + tl.dot(w, change)  # [M, BC]
    tl.store(p_y + sample * s_yb + o_n * s_y + o_c[None, :], y.to(p_y.dtype.element_ty), mask=m_m)


@gpu_op("region_update")
def region_update(weights: Sequence[Tensor], x: Tensor, before: Tensor, after: Tensor, order: Tensor | None) -> Tensor:
    """`foveate.ops.region_matmul.region_update` on a GPU."""
    x, before, after = map(row_contiguous, (x, before, after))
    length = x.shape[1]
    first, place = (sum(part.shape[1] * part.shape[side] for part in weights) for side in (3, 2))
    if (length, before.shape[1], after.shape[1]) != (place, first, first):
        raise ValueError(
            f"the weights are for {place} tokens, {first} of them merged: got {length} tokens in x, "
            f"{before.shape[1]} in before and {after.shape[1]} in after"
        )
    y = _like(weights, x, before, after, order)
    first = place = 0
    for matrices in weights:
        _launch(matrices, x, before, after, order, y, first, place)
        _, regions, rows, tokens = matrices.shape
        first, place = first + regions * tokens, place + regions * rows
    return y


@launcher
def _launch(
    weights: Tensor, x: Tensor, before: Tensor, after: Tensor, order: Tensor | None, y: Tensor, first: int, place: int
) -> Launch:
    (plans, regions, rows, tokens), (batch, _, dim) = weights.shape, x.shape
    args = (
        weights, x, before, after, order, y, regions, rows, tokens, dim, first, place,
        0 if plans == 1 else weights.stride(0), *weights.stride()[1:],
        *x.stride()[:2], *before.stride()[:2], *after.stride()[:2], *y.stride()[:2],
    )  # fmt: skip
    constants = {"M": padded_size(rows), "T": padded_size(tokens), "BC": CHANNELS, "num_warps": WARPS}
    return Launch(_update, (batch * regions, triton.cdiv(dim, CHANNELS)), args, constants)


@torch.library.register_fake(region_update)
def _like(weights: Sequence[Tensor], x: Tensor, before: Tensor, after: Tensor, order: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, _, before, after, order = inputs
    ctx.save_for_backward(*weights, before, after, order)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *weights, before, after, order = ctx.saved_tensors
    dy = grad if order is None else grad.index_select(1, order)
    parts = dy.split([part.shape[1] * part.shape[2] for part in weights], 1)
    dafter = torch.cat([region_matmul(w.mT, part, 0) for w, part in zip(weights, parts, strict=True)], 1)
    dw: list[Tensor | None] = [None for _ in weights]
    if any(w.requires_grad for w in weights):
        changes = (after - before).split([w.shape[1] * w.shape[3] for w in weights], 1)
        for i, (w, *both) in enumerate(zip(weights, parts, changes, strict=True)):
            rows, columns = (part.unflatten(1, (w.shape[1], -1)) for part in both)
            dw[i] = (rows @ columns.mT).sum_to_size(w.shape)
    return dw, grad, -dafter, dafter, None


differentiable(region_update, _save, _differentiate)


BACKENDS = {"triton": (supports, region_update)}
