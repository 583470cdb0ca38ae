# pyright: basic
"""Shared code of the benchmarks: checks and time limits before timing, and statistics of times."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.apps.bench.table import TableColumn, milliseconds
from foveate.utils.timing import MIN_SECONDS, captured, time_calls

__all__ = [
    "TIMES",
    "Timed",
    "check_errors",
    "check_time",
    "note_failure",
    "output_or_gradients",
    "spread",
    "time_rows",
]

ENQUEUED = 20  # most consecutive calls when only the CPU is timed, so that the queue of the GPU never fills
TIMES: list[TableColumn] = [
    ("ms", "median_s", milliseconds),
    ("called, ms", "eager_s", milliseconds),
    ("enqueued, ms", "enqueue_s", milliseconds),
]
"""Times of a call: as a CUDA graph, as called from Python, and until Python returns; the last two on GPUs only."""


class Timed(NamedTuple):
    """A call to time.

    Attributes:
        call: The call as users make it.
        graph: CUDA graph of the call, or the call itself.
    """

    call: Callable[[], object]
    graph: Callable[[], object]

    @classmethod
    def of(cls, call: Callable[[], object], device: torch.device, *, graph: bool = True) -> "Timed":
        """The call and, on a GPU with `graph`, its CUDA graph."""
        return cls(call, captured(call, device) if graph else call)


@contextmanager
def note_failure(row: dict[str, Any]) -> Generator[None]:
    """Context manager that stores an error in the row as "failed", so that one candidate cannot end the benchmark."""
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            row["failed"] = "skipped: out of memory"
        else:
            row["failed"] = (str(error).strip() or type(error).__name__).splitlines()[0]


def check_errors(errors: dict[str, float], tolerance: float) -> None:
    """Raise a ValueError if one of the relative errors is too large or NaN."""
    for name, error in errors.items():
        if not error <= tolerance:  # also true of NaN
            raise ValueError(f"{name.replace('_', ' ')} {error:.1e}: not timed")


def check_time(seconds: float, longest: float, source: str) -> None:
    """Raise a ValueError if a call takes longer than `longest` seconds."""
    if seconds > longest:
        raise ValueError(f"skipped: about {seconds:.2g} s, {source}; more than {longest:g} s")


def output_or_gradients(
    attend: Callable[..., Tensor], qkv: Sequence[Tensor], backward: bool
) -> Callable[[], tuple[Tensor, ...]]:
    """A call of attention that returns the output, or the gradients of q, k and v with q as the output gradient."""
    if not backward:
        return lambda: (attend(*qkv),)
    leaves = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, qkv[0])


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, fastest and slowest of several times."""
    return {"median_s": median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}


def time_rows(
    rows: list[dict[str, Any]], calls: Sequence[Timed], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Add `TIMES`, and speed-ups over the fastest dense candidate, to the rows without failures. Returns these rows.

    Args:
        rows: One row for each candidate: its name is `row["peer"]`, and `row["dense"]` marks dense attention.
        calls: Calls of the rows without failures.
        rounds: Measurements of each call, interleaved.
        device: Device of the calls.
    """
    timed = [row for row in rows if "failed" not in row]
    for row, taken in zip(timed, time_calls([one.graph for one in calls], rounds, device), strict=True):
        row |= spread(taken)
    if device.type == "cuda":
        for row, one, taken in zip(timed, calls, time_calls([one.call for one in calls], rounds, device), strict=True):
            repeats = max(1, min(ENQUEUED, round(MIN_SECONDS / row["median_s"])))
            enqueued = [_enqueue_seconds(one.call, repeats, device) for _ in range(rounds)]
            row |= {"eager_s": median(taken), "enqueue_s": median(enqueued)}
    best, over = min(((row["median_s"], row["peer"]) for row in timed if row["dense"]), default=(None, None))
    for row in timed:
        row |= {"speed_up": best and best / row["median_s"], "fastest_dense": over}
    return timed


def _enqueue_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds until Python returns from a call, averaged over consecutive calls."""
    torch.cuda.synchronize(device)
    began = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - began) / repeats
