# pyright: basic, reportArgumentType=false
"""Shared code of the benchmarks that torchrun starts on several GPUs: times, memory and results of all processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from foveate.utils.device import versions
from foveate.utils.timing import now, peak_memory

__all__ = ["difference", "exchange_share", "join", "most_memory", "save", "slowest"]


def join() -> torch.device:
    """Join the process group, and return the device of this process."""
    rank = int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda", rank)


def slowest(call: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median seconds until the slowest process is done."""
    taken = list[float]()
    for _ in range(2 + rounds):  # two to compile and warm up
        dist.barrier()
        began = now(device)
        call()
        taken.append(_largest(now(device) - began))
    return median(taken[2:])


def most_memory(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory in bytes beyond what is in use before the call, of the process with the most; 0 without a GPU."""
    return int(_largest(float(peak_memory(call, device) or 0)))


def exchange_share(call: Callable[[], object], device: torch.device) -> float:
    """Share of a call's time in which this GPU exchanges data or waits for others; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    dist.barrier()
    began = now(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        seconds = now(device) - began
    exchanges = (event for event in profiled.key_averages() if "nccl" in event.key.lower())
    return sum(event.self_device_time_total for event in exchanges) / 1e6 / seconds


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
