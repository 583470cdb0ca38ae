# pyright: basic
"""Benchmark of what a call costs as it is called: the processor's share, the whole call, and its CUDA graph."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foveate.bench.table import TableColumn, results_table
from foveate.cli.bench import Commit, Out, Rounds, run_and_save
from foveate.methods import HilbertA
from foveate.ops.block_attention import block_attention
from foveate.ops.log_linear_attention import log_linear_attention
from foveate.utils.device import versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, time_calls
from lab.bench.common import note_failure, output_or_gradients

__all__ = ["CASES", "Case", "bench_calls", "main", "table_of"]

ENQUEUED = 20  # calls in a row, few enough that the queue of the GPU never fills


class Case(NamedTuple):
    """An op and its inputs.

    Attributes:
        tokens: Number of tokens.
        heads: Number of heads.
        head_dim: Channels of a head.
        backward: Whether the call is forward and backward.
        attend: The op; None for dense attention.
    """

    tokens: int
    heads: int
    head_dim: int
    backward: bool
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None

    def __str__(self) -> str:
        what = "forward and backward" if self.backward else "forward"
        return f"{self.tokens:,} tokens, {self.heads} heads of {self.head_dim}, {what}"


TABLE = HilbertA(tiles=16).plan(((64, 64),), 512).tables[1]  # of FLUX.1 at 1024 px


def _block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return block_attention(q, k, v, TABLE)


def _log_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return log_linear_attention(q, k, v).out


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


CASES = [
    *(Case(4608, 24, 128, backward, _block_attention) for backward in (False, True)),
    *(Case(tokens, 8, 64, False, _log_linear) for tokens in (4096, 16384, 65536)),
    *(Case(tokens, 8, 64, True, _log_linear) for tokens in (4096, 16384, 65536)),
]


def bench_calls(device: torch.device, rounds: int = 15, track: Track = silent) -> Iterator[dict[str, Any]]:
    """The measurements so far, after every case, ready for JSON.

    Args:
        device: A GPU.
        rounds: Measurements of each call; they take turns.
        track: Shows progress.
    """
    rows: list[dict[str, Any]] = []
    result = {"what": "calls", "cores": os.cpu_count(), "rounds": rounds, "rows": rows, "versions": versions()}
    advance = track("calls", len(CASES))
    for case in CASES:
        shape = 1, case.tokens, case.heads, case.head_dim
        qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        for name, attend in ((case.attend.__name__.strip("_"), case.attend), ("cuDNN, dense", _dense)):
            row: dict[str, Any] = {"case": str(case), "peer": name}
            with note_failure(row):
                call = output_or_gradients(attend, qkv, case.backward)
                row |= _times(call, rounds, device)
            rows.append(row)
        advance()
        yield result


def _times(call: Callable[[], object], rounds: int, device: torch.device) -> dict[str, float]:
    for _ in range(3):
        call()
    enqueue = [_enqueue(call, device) for _ in range(rounds)]
    eager, graph = time_calls([call, captured(call, device)], rounds, device)
    return {"enqueue_s": median(enqueue), "eager_s": median(eager), "graph_s": median(graph)}


def _enqueue(call: Callable[[], object], device: torch.device) -> float:
    """Seconds until Python returns from a call."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(ENQUEUED):
        call()
    return (time.perf_counter() - began) / ENQUEUED


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


COLUMNS: list[TableColumn] = [
    ("", "peer", str),
    ("enqueue, us", "enqueue_s", _microseconds),
    ("call, us", "eager_s", _microseconds),
    ("CUDA graph, us", "graph_s", _microseconds),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case."""
    return results_table(result["rows"], COLUMNS, lambda row: row["case"])


def main(
    rounds: Rounds = 15,
    out: Out = Path("bench"),
    device: Annotated[str, typer.Option(help="The GPU.")] = "cuda",
    commit: Commit = "",
) -> None:
    """Time calls of block attention and log-linear attention as they are called, and as CUDA graphs.

    python -m lab calls                  # on a GPU
    """
    run_and_save(out / "calls-cuda.json", commit, partial(bench_calls, torch.device(device), rounds), table_of)
