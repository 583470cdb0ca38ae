# pyright: basic, reportPrivateImportUsage=false
"""How long calls take, and how much memory."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["LONG_ENOUGH", "Marks", "captured", "first_line", "peak_memory", "time_calls", "time_shares"]

Call = Callable[[], object]
LONG_ENOUGH = 0.005  # seconds of one measurement


def first_line(error: Exception) -> str:
    """What a table says of what could not be measured."""
    if isinstance(error, torch.OutOfMemoryError):
        return "skipped: out of memory"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def time_calls(calls: Sequence[Call], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of one call, [call][round]: in every round each is measured once, so that all meet the same moments.

    A measurement repeats the call for 5 ms at least.

    Args:
        calls: What to time, as `captured` gives them.
        rounds: How often to measure each.
        device: Where they run.
    """
    repeats = [max(1, round(LONG_ENOUGH / _seconds(call, 1, device))) for call in calls]
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
    """Bytes that a call has allocated at most; None where nobody counts.

    Args:
        call: What to measure.
        device: Where it runs.
        beyond: Leave out what was there before.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if beyond else 0
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def captured(call: Call, device: torch.device) -> Call:
    """The call as it is timed: on a GPU a CUDA graph of it, so that the time to launch it does not count."""
    if device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # warm up on a stream of its own, as capturing a backward pass asks for
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()

    def replay() -> None:
        graph.replay()
        _ = call  # holds what the graph reads: tables, and what was derived from them

    return replay


class Marks:
    """A clock that is told when a stage of the work has been asked for; nothing waits for the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self("")

    def __call__(self, stage: str) -> None:
        """End a stage."""
        if self.device.type != "cuda":
            self._marks.append((stage, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append((stage, event))

    def seconds(self) -> dict[str, float]:
        """What each stage took, on the device where there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return {stage: a.elapsed_time(b) / 1000 for (_, a), (stage, b) in pairwise(self._marks)}
        return {stage: b - a for (_, a), (stage, b) in pairwise(self._marks)}


def time_shares(call: Call, names: Sequence[str], device: torch.device) -> list[float]:
    """Which fraction of a call's time goes into each of these ops and `record_function` ranges; 0 where it never runs.

    On a GPU the time is that of kernels, wherever they were launched; else that of ops on the CPU. What lies within
    another one of the names counts for the outer one alone.

    Args:
        call: What to profile.
        names: Of the ops and ranges.
        device: Where it runs.
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
    """Whether an event lies in one of these names."""
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
