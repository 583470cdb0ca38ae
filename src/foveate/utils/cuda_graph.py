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
    """Record a function as a CUDA graph. Returns (replay, output); every replay overwrites the output.

    Args:
        function: Function to record. It must have run before, so that its kernels are compiled.
        pool: Memory pool to share with other graphs; None for a private pool.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_blas_handle()  # cuBLAS cannot create a thread's handle during capture
    with _RECORDING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = function()
    return graph.replay, output
