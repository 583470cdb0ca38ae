# pyright: basic, reportPrivateImportUsage=false
"""Time and memory of calls, for benchmarks."""

from collections.abc import Callable, Sequence

import torch

from foveate.utils.device import Stopwatch

__all__ = ["MIN_SECONDS", "captured", "peak_memory", "time_calls"]

Call = Callable[[], object]
MIN_SECONDS = 0.005  # duration of one measurement


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


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    watch = Stopwatch(device)
    with watch.step("calls"):
        for _ in range(repeats):
            call()
    return watch.seconds["calls"] / repeats
