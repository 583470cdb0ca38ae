# pyright: basic, reportArgumentType=false
"""Attention over a block table in FP8 on Hopper GPUs: a custom op around the rounding and the attention kernel."""

from functools import partial

import torch
from torch import Tensor

from foveate.kernels.block import hopper_fp8
from foveate.kernels.block.block_attention import on_hopper, supports_hopper
from foveate.kernels.block.round_inputs import round_inputs
from foveate.kernels.launch import empty_like, gpu_op
from foveate.ops.block_table import BlockTable

__all__ = ["BACKENDS", "block_attention_fp8"]


def block_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, scale: float, scatter: Tensor | None = None
) -> Tensor:
    """Output of `foveate.ops.block_attention` with ``precision="fp8"``."""
    if scale < 0:  # kernels take the running maximum of unscaled scores
        q, scale = -q, -scale
    return _forward(q, k, v, *table, scatter, scale)


BACKENDS = {"hopper": (supports_hopper, block_attention_fp8)}


@gpu_op("block_attention_fp8")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scatter: Tensor | None,
    scale: float,
) -> Tensor:
    out, table = empty_like(q), BlockTable(query_starts, key_starts, offsets, keys)
    if not q.numel() or not k.numel():
        return out.zero_()
    launch = partial(hopper_fp8.launch, scatter=scatter)
    on_hopper(launch, table, round_inputs(q, k, v), (out,), (0.0,), scale, hopper_fp8.CUT)
    return out


@torch.library.register_fake(_forward)
def _(q: Tensor, *args: object) -> Tensor:
    return empty_like(q)
