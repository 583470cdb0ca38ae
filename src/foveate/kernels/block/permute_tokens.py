# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Rotate queries and keys and reorder queries, keys and values: one launch, one read, one write."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, gpu_op, launcher, row_contiguous

__all__ = ["BACKENDS"]


@triton.jit
def _permute(p_q, p_k, p_v, p_out_q, p_out_k, p_out_v, p_order, p_cos, p_sin, sb_q, st_q, sh_q, sb_k, st_k, sh_k, sb_v,
             st_v, sh_v, tokens, taken, ORDER: tl.constexpr, ROPE: tl.constexpr, ROPE_BATCH: tl.constexpr,
             R: tl.constexpr, HALVES: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
             BD: tl.constexpr):  # fmt: skip
    """One token of one sample; program axis 2 chooses queries, keys or values."""
    row, b, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    source = (tl.load(p_order + row) if ORDER else row).to(tl.int64)
    heads, dims = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None]
    mask = (heads < H) & (dims < D)  # [BH, BD]
    o_out = ((b * taken + row) * H + heads) * D + dims
    if which == 2:
        tl.store(p_out_v + o_out, tl.load(p_v + b * sb_v + source * st_v + heads * sh_v + dims, mask), mask)
    else:
        p_row = p_q + b * sb_q + source * st_q + heads * sh_q
        if which == 1:
            p_row = p_k + b * sb_k + source * st_k + heads * sh_k
        x = tl.load(p_row + dims, mask)  # [BH, BD]
        if ROPE:
            o_angle = ((b * tokens if ROPE_BATCH else 0) + source) * R + dims
            cos, sin = tl.load(p_cos + o_angle, dims < R, 1.0), tl.load(p_sin + o_angle, dims < R, 0.0)
            if HALVES:
                first = dims < R // 2
                other = tl.where(first, dims + R // 2, tl.where(dims < R, dims - R // 2, dims))
                turned = tl.load(p_row + other, mask).to(tl.float32)
                x = (x.to(tl.float32) * cos + tl.where(first, -turned, turned) * sin).to(x.dtype)
            else:
                cos_even, cos_odd = tl.split(tl.reshape(cos, [1, BD // 2, 2]))
                sin_even, sin_odd = tl.split(tl.reshape(sin, [1, BD // 2, 2]))
                even, odd = tl.split(tl.reshape(x.to(tl.float32), [BH, BD // 2, 2]))  # [BH, BD / 2]
                turned = tl.join(even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd)
                x = tl.reshape(turned, [BH, BD]).to(x.dtype)
        tl.store((p_out_k if which == 1 else p_out_q) + o_out, x, mask)


def permute_tokens(
    tensors: tuple[Tensor, ...],
    order: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
    halves: bool = False,
) -> tuple[Tensor, ...]:
    """`foveate.ops.permute_tokens` on a GPU."""
    return tuple(_permute_tokens(list(tensors), order, *(rope or (None, None)), halves))


@gpu_op("permute_tokens")
def _permute_tokens(
    tensors: list[Tensor], order: Tensor | None, cos: Tensor | None, sin: Tensor | None, halves: bool = False
) -> list[Tensor]:
    outs, tensors = _outputs(tensors, order), [row_contiguous(x) for x in tensors]
    cos, sin = (None if x is None else x.float().contiguous() for x in (cos, sin))
    _launch(tensors, outs, order, cos, sin, halves)
    return outs


@launcher
def _launch(
    tensors: list[Tensor],
    outs: list[Tensor],
    order: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    halves: bool,
) -> Launch:
    (batch, tokens, heads, dim), taken = tensors[0].shape, outs[0].shape[1]
    ins, three = (xs + (3 - len(xs)) * xs[-1:] for xs in (tensors, outs))  # unused places repeat the last tensor
    given = (outs[0] if x is None else x for x in (order, cos, sin))
    args = *ins, *three, *given, *(stride for x in ins for stride in x.stride()[:3]), tokens, taken
    constants = {
        "ORDER": order is not None, "ROPE": cos is not None, "ROPE_BATCH": cos is not None and cos.ndim == 3,
        "R": dim if cos is None else cos.shape[-1], "HALVES": halves, "num_warps": 8 if halves else 4,
        "H": heads, "BH": triton.next_power_of_2(heads), "D": dim, "BD": triton.next_power_of_2(dim),
    }  # fmt: skip
    return Launch(_permute, (taken, batch, len(tensors)), args, constants)


@torch.library.register_fake(_permute_tokens)
def _outputs(tensors: list[Tensor], order: Tensor | None, *_: object) -> list[Tensor]:
    return [x.new_empty(x.shape[0], x.shape[1] if order is None else order.shape[0], *x.shape[2:]) for x in tensors]


def supports(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel runs: an NVIDIA GPU, 16-bit or 32-bit tensors, an even number of channels."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16, torch.float32) and size % 2 == 0


BACKENDS: dict[str, tuple[Any, Any]] = {"triton": (supports, permute_tokens)}
