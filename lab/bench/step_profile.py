# pyright: basic, reportPrivateImportUsage=false
"""Where the time of a denoising step goes: attention, merging and plans; and what merging loses of features."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import lcm
from statistics import mean, median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from rich.table import Table
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from foveate.bench.models import find_model
from foveate.bench.step import Step, merging_part
from foveate.bench.step import table_of as table_with
from foveate.diffusers.apply import apply
from foveate.diffusers.lora import using
from foveate.diffusers.pipelines import denoiser, time_steps
from foveate.methods import ComposedMethod, Method
from foveate.methods.base import SparseAttention, TokenMerging
from foveate.ops.joint_attention import joint_attention
from foveate.utils.device import choose_device, choose_dtype, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, time_calls
from lab.bench.reconstruction import FEATURES, reconstruction_error

__all__ = ["profile_step", "table_of", "time_shares"]

MERGE, PLAN = ("foveate::region_matmul", "foveate::region_update"), "foveate::plan"  # names in a profile


@torch.no_grad()
def profile_step(
    sides: Sequence[int],
    *,
    model: str = "built-in",
    methods: Sequence[Method | ComposedMethod] = (),
    text: int | None = None,
    compile: bool = False,
    rounds: int = 9,
    device: str = "auto",
    dtype: str = "auto",
    track: Track = silent,
) -> Iterator[dict[str, Any]]:
    """The parts of the time of one forward pass with each method, after every new row.

    A method that merges tokens is profiled over one cycle of its schedule: `merge_share` is the fraction of the time
    in the ops that merge and unmerge, `plan_share` that in plans. Both are 0 where compiled code or other ops do
    this, for example on a CPU. In a UNet, `reconstruction_random` and `reconstruction_smooth` are the errors of
    `reconstruction_error`. In FLUX, sparse attention is also timed alone, against dense attention in the same shape:
    `attention_share` of the step, `attention_speed_up`.

    The arguments are those of `foveate.bench.step.bench_step`.
    """
    chosen, where = find_model(model), choose_device(device)
    pipe = chosen.build(where, choose_dtype(dtype, where))
    network: Any = denoiser(pipe)
    if compile:
        network.compile_repeated_blocks(fullgraph=True)
    text = chosen.text if text is None else text
    rows: list[dict[str, Any]] = []
    result = {"what": "parts of one forward pass", "model": model, "compiled": compile, "device": where.type,
              "dtype": str(pipe.dtype).removeprefix("torch."), "rows": rows, "versions": versions()}  # fmt: skip
    for side in sides:
        step = Step(pipe, chosen.inputs(pipe, side, text))
        advance = track(f"{side} x {side} tokens", len(methods or chosen.methods))
        for method in methods or chosen.methods:
            row: dict[str, Any] = {"image_tokens": side * side, "variant": method.title, "method": repr(method)}
            if merging := merging_part(method):
                row |= _merging_shares(step, method, merging)
                if not isinstance(network, FluxTransformer2DModel):
                    row |= {f"reconstruction_{f}": reconstruction_error(merging, f, side, where) for f in FEATURES}
            elif isinstance(network, FluxTransformer2DModel):
                row |= _attention_alone(step, method, side, text or 0, rounds)
            rows.append(row)
            advance()
            yield result


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


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
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
    return table_with(result, COLUMNS)
