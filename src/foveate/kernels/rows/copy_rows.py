# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
"""Copies of rows of keys or values, with rotation of keys: a Triton kernel.

One program copies a tile of rows of one head. Lower bound: every element is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.block.block_attention import supports
from foveate.kernels.launch import Launch, launcher

__all__ = ["BACKENDS", "copy_rows"]

ROWS = 32  # rows of a tile
WARPS = 4


@triton.jit
def copy_tile(
    p_x, p_out, p_cos, p_sin, heads, rows, s_xl, s_xh, s_x, s_ol, s_oh, s_o, s_cos, s_sin,
    HALF: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of rows, both halves of the channels together, because rotation pairs them."""
    layer, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    o_m, o_d = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BH)
    mask = (o_m < rows)[:, None] & (o_d < HALF)[None, :]
    p_x += layer * s_xl + head * s_xh + o_m.to(tl.int64)[:, None] * s_x + o_d[None, :]  # [BM, BH]
    p_out += layer * s_ol + head * s_oh + o_m.to(tl.int64)[:, None] * s_o + o_d[None, :]
    first, second = tl.load(p_x, mask=mask), tl.load(p_x + HALF, mask=mask)
    if ROTATE:
        p_cos += o_m[:, None] * s_cos + o_d[None, :]
        p_sin += o_m[:, None] * s_sin + o_d[None, :]
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = (x * tl.load(p_cos, mask=mask) - y * tl.load(p_sin, mask=mask)).to(first.dtype)
        second = (y * tl.load(p_cos + HALF, mask=mask) + x * tl.load(p_sin + HALF, mask=mask)).to(second.dtype)
    tl.store(p_out, first, mask=mask)
    tl.store(p_out + HALF, second, mask=mask)


def copy_rows(out: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """`foveate.ops.rotary.copy_rows` on a GPU."""
    if out.stride(-1) != 1 or x.stride(-1) != 1:
        raise ValueError("the channels of a row must be contiguous in memory: pass contiguous tensors")
    if x.numel():
        with torch.cuda.device_of(x):
            _launch(out, x, *((x, x, False) if cos is None or sin is None else (cos.float(), sin.float(), True)))


@launcher
def _launch(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rotates: bool) -> Launch:
    layers, heads, rows, dim = x.shape
    args = (
        x, out, cos, sin, heads, rows, *x.stride()[:3], *out.stride()[:3], cos.stride(-2), sin.stride(-2),
    )  # fmt: skip
    constants = {
        "HALF": dim // 2, "BH": triton.next_power_of_2(dim // 2), "BM": ROWS, "ROTATE": rotates, "num_warps": WARPS,
    }  # fmt: skip
    return Launch(copy_tile, (layers * heads, triton.cdiv(rows, ROWS)), args, constants)


def _supports(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    return supports(device, dtype, dim) and dim % 2 == 0


BACKENDS = {"triton": (_supports, copy_rows)}
