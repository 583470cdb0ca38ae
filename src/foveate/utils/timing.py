# pyright: basic, reportPrivateImportUsage=false
"""Benchmark timers: time, memory and profile of calls."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["MIN_SECONDS", "Marks", "captured", "first_line", "peak_memory", "time_calls", "time_shares"]

Call = Callable[[], object]
MIN_SECONDS = 0.005  # of one measurement


def first_line(error: Exception) -> str:
    """One-line description of an error, for tables of results."""
    if isinstance(error, torch.OutOfMemoryError):
        return "skipped: out of memory"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def time_calls(calls: Sequence[Call], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds per call, [call][round]. Calls are interleaved: every round measures each call once.

    A measurement repeats its call for at least 5 ms.

    Args:
        calls: Functions to time; see `captured`.
        rounds: Number of measurements of each call.
        device: Device on which the calls run.
    """
    repeats = [max(1, round(MIN_SECONDS / _seconds(call, 1, device))) for call in calls]
    return [
        list(times)
        for times in zip(
            *(
                [_seconds(call, repeat, device) for call, repeat in zip(calls, repeats, strict=True)]
                for _ in range(rounds)
            ),
            strict=True,
        )
    ]


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
    """The call to time: on a GPU its CUDA graph, which leaves out the launch overhead."""
    if device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # capturing a backward pass requires a warm-up on a side stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()

    def replay() -> None:
        graph.replay()
        _ = call  # keeps the tensors alive that the graph reads

    return replay


class Marks:
    """Durations of consecutive stages on a device, without waiting for the device in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self("")

    def __call__(self, stage: str) -> None:
        """Mark the end of a stage."""
        if self.device.type != "cuda":
            self._marks.append((stage, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append((stage, event))

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return {stage: a.elapsed_time(b) / 1000 for (_, a), (stage, b) in pairwise(self._marks)}
        return {stage: b - a for (_, a), (stage, b) in pairwise(self._marks)}


def time_shares(call: Call, names: Sequence[str], device: torch.device) -> list[float]:
    """Fraction of a call's time spent in each of the named ops and `record_function` ranges; 0 if it never runs.

    On a GPU this is kernel time, otherwise CPU time of ops. Nested names count for the outermost one only.

    Args:
        call: Function to profile.
        names: Names of the ops and ranges.
        device: Device on which the call runs.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        call()
    events = list(profiler.events() or [])
    if on_gpu:
        kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        total = sum(kernel.device_time_total for kernel in kernels)
    else:
        total = sum(event.self_cpu_time_total for event in events)
    spent = dict.fromkeys(names, 0.0)
    for event in events:
        if event.name in spent and event.device_type == DeviceType.CPU and not _within(event, names):
            spent[event.name] += event.device_time_total if on_gpu else event.cpu_time_total
    return [time / total if total else 0.0 for time in spent.values()]


def _within(event: Any, names: Sequence[str]) -> bool:
    """Whether an event is nested in one of these names."""
    outer = event.cpu_parent
    return outer is not None and (outer.name in names or _within(outer, names))


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    for _ in range(repeats):
        call()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats
