# pyright: basic, reportPrivateImportUsage=false
"""Time of steps, and time and memory of calls."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from foveate.utils.cuda_graph import record_graph

__all__ = ["MIN_SECONDS", "Stopwatch", "captured", "now", "peak_memory", "time_calls"]

Call = Callable[[], object]
MIN_SECONDS = 0.005  # duration of one measurement


def now(device: torch.device) -> float:
    """Clock time in seconds, after all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Durations of steps on a device. A GPU is timed by CUDA events, so that steps do not wait for each other.

    Examples:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> with watch.step("sum"):
        ...     total = torch.ones(9).sum()
        >>> list(watch.seconds)
        ['sum']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Time a `with` block."""
        start = self._mark()
        yield
        self._laps[name] = start, self._mark()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each finished step. Waits for the device."""
        return {name: _seconds_between(*lap) for name, lap in self._laps.items()}

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return now(self._device)
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def time_calls(calls: Sequence[Call], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds per call, [call][round]. Calls are interleaved: every round measures each call once.

    A measurement repeats its call for at least 5 ms.

    Args:
        calls: Functions to time; see `captured`.
        rounds: Number of measurements of each call.
        device: Device on which the calls run.
    """
    repeats = [max(1, round(MIN_SECONDS / _seconds(call, 1, device))) for call in calls]
    times = [
        [_seconds(call, repeat, device) for call, repeat in zip(calls, repeats, strict=True)] for _ in range(rounds)
    ]
    return [list(of_call) for of_call in zip(*times, strict=True)]


def peak_memory(call: Call, device: torch.device, *, beyond: bool = True) -> int | None:
    """Peak memory in bytes during a call on a GPU; None on other devices.

    Args:
        call: Function to measure.
        device: Device on which it runs.
        beyond: Subtract the memory that was allocated before the call.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if beyond else 0
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def captured(call: Call, device: torch.device) -> Call:
    """The call to time: on a GPU the replay of its CUDA graph, which has no launch overhead."""
    if device.type != "cuda":
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # capturing a backward pass requires a warm-up on a side stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        replay, _ = record_graph(call)

    def timed() -> None:
        replay()
        _ = call  # keeps the tensors alive that the graph reads

    return timed


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    watch = Stopwatch(device)
    with watch.step("calls"):
        for _ in range(repeats):
            call()
    return watch.seconds["calls"] / repeats
