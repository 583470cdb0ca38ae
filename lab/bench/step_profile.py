# pyright: basic, reportPrivateImportUsage=false
"""Profile of a denoising step: time of attention, merging and plans; and the reconstruction error of merging."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import lcm
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from rich.table import Table
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from foveate.apps.bench.step import Setup, Step, merging_part
from foveate.apps.bench.table import TableColumn, results_table
from foveate.apps.console import (
    Commit,
    Compile,
    Device,
    Dtype,
    Out,
    Rounds,
    Sides,
    StepModel,
    StepText,
    TimedMethods,
    numbers,
    run_and_save,
)
from foveate.diffusers.apply import apply
from foveate.methods import ComposedMethod, Method, read_method
from foveate.methods.base import SparseAttention, TokenMerging
from foveate.ops.joint_attention import joint_attention
from foveate.pipelines.lora import using
from foveate.pipelines.request import denoiser
from foveate.pipelines.steps import time_steps
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, time_calls
from lab.bench.reconstruction import FEATURES, reconstruction_error

__all__ = ["main", "profile_step", "table_of", "time_shares"]

MERGE, PLAN = ("foveate::region_matmul", "foveate::region_update"), "foveate::plan"  # names in a profile


@torch.no_grad()
def profile_step(
    setup: Setup, sides: Sequence[int], *, rounds: int = 9, track: Track = silent
) -> Iterator[dict[str, Any]]:
    """Yield the shares of the time of one forward pass with each method, after every new row.

    A method that merges tokens is profiled over one cycle of its schedule: `merge_share` is the fraction of the time
    in the ops that merge and unmerge, `plan_share` the fraction in plans. Both are 0 if compiled code or other ops do
    this work, for example on a CPU. In a UNet, `reconstruction_random` and `reconstruction_smooth` are the errors of
    `reconstruction_error`. In FLUX, sparse attention is also timed alone, against dense attention in the same shape:
    `attention_share` of the step, `attention_speed_up`.

    For the arguments, see `foveate.apps.bench.step.bench_step`.
    """
    is_flux = isinstance(denoiser(setup.pipe), FluxTransformer2DModel)
    rows: list[dict[str, Any]] = []
    for side in sides:
        step = setup.step((side, side))
        advance = track(f"{side} x {side} tokens", len(setup.methods))
        for method in setup.methods:
            row: dict[str, Any] = {"image_tokens": side * side, "variant": method.title, "method": repr(method)}
            if merging := merging_part(method):
                row |= _merging_shares(step, method, merging)
                if not is_flux:
                    where = setup.pipe.device
                    row |= {f"reconstruction_{f}": reconstruction_error(merging, f, side, where) for f in FEATURES}
            elif is_flux:
                row |= _attention_alone(step, method, side, setup.text or 0, rounds)
            rows.append(row)
            advance()
            yield setup.about | {"what": "parts of one forward pass", "rows": rows}


def _merging_shares(step: Step, method: Method | ComposedMethod, merging: TokenMerging) -> dict[str, float]:
    cycle = lcm(merging.dst_every, merging.merge_every)
    with apply(step.pipe, *method.parts):
        for number in range(cycle):  # warm-up
            step.run_as(number)
        *merge, plan = time_shares(
            lambda: [step.run_as(number) for number in range(cycle, 2 * cycle)], [*MERGE, PLAN], step.pipe.device
        )
    step.pipe.scheduler.set_begin_index(0)
    return {"merge_share": sum(merge), "plan_share": plan}


def _attention_alone(
    step: Step, method: Method | ComposedMethod, side: int, text: int, rounds: int
) -> dict[str, float]:
    """Share of attention, softmax(q k) v alone, in a step, and its speed-up over dense attention."""
    transformer: Any = denoiser(step.pipe)
    (sparse,) = (part for part in method.parts if isinstance(part, SparseAttention))
    config, device = transformer.config, transformer.device
    shape = 1, side * side + text, config.num_attention_heads, config.attention_head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=transformer.dtype).transpose(1, 2) for _ in range(3))
    first = sparse.plan(((side, side),), text).tables[0]
    calls: list[Callable[[], object]] = [
        partial(scaled_dot_product_attention, q, k, v), partial(joint_attention, q, k, v, first)
    ]  # fmt: skip
    for call in calls:
        call()
    dense_s, sparse_s = map(median, time_calls([captured(call, device) for call in calls], rounds, device))
    step_s = median(taken for (taken,) in time_steps(step.pipe, step.call, [method], rounds))
    with using(step.pipe, method) as run:
        step.run()
        layers = run.summary().layers if run else []
    return {
        "attention_share": len(layers) * sparse_s / step_s,
        "attention_speed_up": dense_s / sparse_s,
        "attention_flop_bound": 1 / (1 - mean(layer.true for layer in layers)),
    }


def time_shares(call: Callable[[], object], names: Sequence[str], device: torch.device) -> list[float]:
    """Fraction of a call's time spent in each of the named ops and `record_function` ranges; 0 if it never runs.

    On a GPU this is kernel time, otherwise CPU time of ops. Nested names count for the outermost name only.

    Args:
        call: Function to profile.
        names: Names of the ops and ranges.
        device: Device of the call.
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


COLUMNS: list[TableColumn] = [
    ("tokens", "image_tokens", "{:,}".format),
    ("variant", "variant", str),
    ("attention", "attention_share", "{:.0%}".format),
    ("its speed-up", "attention_speed_up", "{:.2f}x".format),
    ("its bound", "attention_flop_bound", "{:.2f}x".format),
    ("merging", "merge_share", "{:.1%}".format),
    ("plans", "plan_share", "{:.1%}".format),
    ("error, random", "reconstruction_random", "{:.3f}".format),
    ("error, smooth", "reconstruction_smooth", "{:.3f}".format),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal."""
    return results_table(result["rows"], COLUMNS)


def main(
    model: StepModel = "built-in",
    sides: Sides = "64",
    method: TimedMethods = None,
    compile: Compile = False,
    text: StepText = None,
    rounds: Rounds = 9,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Show where the time of a denoising step goes: attention, merging, plans.

    [bold]foveate bench step[/] measures the time itself. For SDXL this also prints the error of merging and unmerging
    random and smooth features, because with random weights there are no images to judge.

    python -m lab step-profile --model sdxl --compile
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences the profiler
    lengths, methods = numbers(sides), [read_method(text) for text in method or []]
    setup = Setup.of(model, methods=methods, compile=compile, text=text, device=device, dtype=dtype)
    name = f"step-profile-{Path(model).name}-{'compiled' if compile else 'eager'}-{setup.about['device']}.json"
    run_and_save(out / name, commit, partial(profile_step, setup, lengths, rounds=rounds), table_of)
