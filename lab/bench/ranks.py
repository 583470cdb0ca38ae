# pyright: basic, reportArgumentType=false, reportOptionalIterable=false
"""Shared code of the benchmarks that torchrun starts on several GPUs: times, memory and results of all processes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from foveate.utils.device import versions
from foveate.utils.timing import now, peak_memory

__all__ = ["difference", "exchange_share", "exchange_shares", "length", "most_memory", "save", "slowest"]

Interval = tuple[float, float]


def slowest(call: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median seconds until the slowest process is done."""
    taken = list[float]()
    for _ in range(2 + rounds):  # two to compile and warm up
        dist.barrier()
        began = now(device)
        call()
        taken.append(_largest(now(device) - began))
    return median(taken[2:])


def most_memory(call: Callable[[], object], device: torch.device, *, beyond: bool = True) -> int:
    """Peak memory in bytes of the process with the most, by default beyond what is in use before; 0 without a GPU."""
    return int(_largest(float(peak_memory(call, device, beyond=beyond) or 0)))


def exchange_share(call: Callable[[], object], device: torch.device) -> float:
    """Share of a call's time in which this GPU exchanges data or waits for others; 0 without a GPU."""
    return exchange_shares(call, device)["exchange_share"]


def exchange_shares(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """The same, and the share in which this GPU does nothing else; where exchanges overlap with computation, less."""
    if device.type != "cuda":
        return {"exchange_share": 0.0, "exposed_exchange_share": 0.0}
    dist.barrier()
    began = now(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        seconds = now(device) - began
    exchanges, others = list[Interval](), list[Interval]()
    for event in profiled.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            work = exchanges if "nccl" in event.name.lower() else others
            work.append((event.time_range.start, event.time_range.end))
    covered = length(exchanges + others)
    return {
        "exchange_share": length(exchanges) / 1e6 / seconds,
        "exposed_exchange_share": (covered - length(others)) / 1e6 / seconds,
    }


def length(intervals: list[Interval]) -> float:
    """Length of the union of intervals."""
    total, covered = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative difference."""
    return float((got - want).float().norm() / want.float().norm())


def save(file: Path, about: dict[str, Any], rows: list[dict[str, Any]], commit: str | None) -> None:
    """Write the results so far as JSON, in the first process."""
    if dist.get_rank() == 0:
        about |= {"gpus": dist.get_world_size(), "versions": versions() | ({"commit": commit} if commit else {})}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
        print(rows[-1], flush=True)


def _largest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
