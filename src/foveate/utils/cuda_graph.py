# pyright: basic
"""Recording of CUDA graphs."""

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import torch

__all__ = ["record_graph"]

T = TypeVar("T")
_RECORDING = Lock()


def record_graph(function: Callable[[], T], pool: Any = None) -> tuple[Callable[[], None], T]:
    """What replays a function as a CUDA graph, and the function's output, which every replay overwrites.

    Args:
        function: The function. It must have run before, so that its kernels are compiled.
        pool: Memory pool that graphs share; None gives the graph memory of its own.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_blas_handle()  # cuBLAS cannot create a thread's handle during capture
    with _RECORDING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = function()
    return graph.replay, output
