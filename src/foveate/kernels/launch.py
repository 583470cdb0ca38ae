# pyright: basic, reportPrivateImportUsage=false
"""What the launches of all kernels share: custom ops on the right GPU, memory layouts, and sizes of the device."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import CustomOpDef

__all__ = [
    "SMALLEST_DOT",
    "empty_like",
    "empty_lse",
    "gpu_op",
    "half_precision",
    "multiprocessors",
    "padded_size",
    "row_contiguous",
    "shared_memory",
]

SMALLEST_DOT = 16  # smallest side of a matrix product


def gpu_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator that makes a function a custom op that runs on the GPU of its first tensor.

    Triton launches kernels on the current GPU, which may be another one.

    Args:
        name: Name of the op, such as ``foveate::block_attention``.
    """

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def on_its_gpu(*args: Any) -> Any:
            flat = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg]))
            with torch.cuda.device_of(next(x for x in flat if isinstance(x, Tensor))):
                return function(*args)

        return torch.library.custom_op(name, on_its_gpu, mutates_args=())

    return decorate


def half_precision(dtype: torch.dtype) -> bool:
    """Whether a dtype is bfloat16 or float16."""
    return dtype in (torch.bfloat16, torch.float16)


def padded_size(size: int) -> int:
    """The smallest power of two that holds `size` and is a valid side of a matrix product."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


# Kernels accept any stride from token to token, but need stride 1 within a token.


def row_contiguous(x: Tensor) -> Tensor:
    """`x`, copied unless its last dimension has stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """An uninitialized tensor of the shape of `x`, in its layout if the last dimension has stride 1 there."""
    empty = torch.empty_like(x)  # does not keep the layout of overlapping tensors
    return empty if empty.stride(-1) == 1 else x.new_empty(x.shape)


def empty_lse(q: Tensor) -> Tensor:
    """An uninitialized float32 number for each query of q [batch, heads, queries, head_dim]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program; Triton's interpreter has no limit."""
    if device.type != "cuda":
        return 2**20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
