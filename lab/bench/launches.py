# pyright: basic, reportArgumentType=false
"""Benchmark of `foveate.kernels.launch`: recorded launches against plain Triton launches and standard custom ops.

python -m lab.bench.launches bench/launches-cuda.json       # a GPU with 40 GB: about 4 minutes
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import foveate.ops.merging
import foveate.ops.permute_tokens
import foveate.ops.row_attention  # noqa: F401 - registers the ops of all kernels
from foveate import LLSA, HilbertA, ToMA
from foveate.apps.bench.step import Setup
from foveate.diffusers.apply import apply
from foveate.kernels import launch
from foveate.methods import ComposedMethod
from foveate.ops.block_attention import block_attention
from foveate.ops.log_linear_attention import log_linear_attention
from foveate.utils.device import versions
from foveate.utils.timing import now

GPU = torch.device("cuda")
CALLS_IN_A_ROW, ROUNDS, STEPS = 20, 5, 10  # ten steps are one cycle of ToMA's plans
BOTH = ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))
STEP_METHODS = {
    "flux-dev": (None, HilbertA(tiles=16), LLSA(top_k=16), ToMA(keep=0.5), BOTH),
    "sdxl": (None, HilbertA(tiles=16, min_tokens=0), ToMA(keep=0.5)),
}
OPS = dict(launch._WITH_GRADIENT)


def _custom_op(op: Any) -> Any:
    custom = torch.library.custom_op("lab::" + op._schema.name.split("::")[1], launch._FUNCTIONS[op], mutates_args=())
    if op in launch._GRADIENTS:
        save, differentiate = launch._GRADIENTS[op]
        custom.register_autograd(differentiate, setup_context=save)
    return custom


CUSTOM_OPS = {op: _custom_op(op) for op in OPS}
VARIANTS = ("recorded", "plain launches", "custom ops")


def use(variant: str) -> None:
    """Switch to a way of launching kernels."""
    launch.INTERPRETED = variant != "recorded"  # turns recording off
    launch._WITH_GRADIENT.update(CUSTOM_OPS if variant == "custom ops" else OPS)


def seconds_of_call(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds per call until Python returns, and until the GPU is done, in consecutive calls."""
    start = now(GPU)
    for _ in range(CALLS_IN_A_ROW):
        call()
    enqueued = time.perf_counter() - start
    return enqueued / CALLS_IN_A_ROW, (now(GPU) - start) / CALLS_IN_A_ROW


def calls() -> dict[str, Callable[[], object]]:
    """One call of block attention and of log-linear attention, without and with gradients."""
    table = HilbertA(tiles=16).plan(((64, 64),), 512).tables[0]
    attend = {
        "block attention": (lambda q, k, v: block_attention(q, k, v, table), (1, 24, 4608, 128)),
        "log-linear": (lambda q, k, v: log_linear_attention(q, k, v, top_k=8, block_size=16).out, (1, 8, 4096, 64)),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, (function, shape) in attend.items():
        q, k, v = (torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

        def forward(function: Any = function, qkv: tuple[Tensor, ...] = (q, k, v)) -> None:
            with torch.no_grad():
                function(*qkv)

        def both(function: Any = function, qkv: tuple[Tensor, ...] = (q, k, v)) -> None:
            torch.autograd.grad(function(*qkv), qkv, qkv[0])

        calls |= {name: forward, f"{name}, forward and backward": both}
    return calls


def time_calls() -> Iterator[dict[str, Any]]:
    """A row for each call and variant; variants are interleaved."""
    for name, call in calls().items():
        taken: dict[str, list[tuple[float, float]]] = {}
        for variant in VARIANTS * ROUNDS:
            use(variant)
            if variant == "custom ops" and name.startswith("log-linear,"):
                continue  # standard custom ops return gradients of lists in another form
            if variant not in taken:
                call()
            taken.setdefault(variant, []).append(seconds_of_call(call))
        for variant, pairs in taken.items():
            enqueued, called = map(median, zip(*pairs, strict=True))
            yield {"case": name, "variant": variant, "enqueue_s": enqueued, "call_s": called}


@torch.no_grad()
def time_steps(model: str) -> Iterator[dict[str, Any]]:
    """A row for each method and variant: whole eager steps at 1024 px, interleaved, over a cycle of plans."""
    setup = Setup.of(model, device="cuda", dtype="bfloat16")
    step = setup.step((64, 64))
    for method in STEP_METHODS[model]:
        taken: dict[str, list[float]] = {}
        with apply(setup.pipe, *method.parts) if method else nullcontext():
            expected = step.run().clone()
            for variant in VARIANTS * ROUNDS:
                use(variant)
                step.run_as(0)
                if not torch.equal(step.run(), expected):
                    raise ValueError(f"the output of {model} with {variant} differs: not timed")
                start = now(GPU)
                for number in range(STEPS):
                    step.run_as(number)
                taken.setdefault(variant, []).append((now(GPU) - start) / STEPS)
        title = method.title if method else "dense"
        for variant, seconds in taken.items():
            yield {
                "model": model,
                "case": title,
                "variant": variant,
                "step_s": median(seconds),
            }


def main(path: Path) -> None:
    """Time calls and steps, and write the JSON file after every row."""
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    about = {"what": "ways to launch kernels", "cores": os.cpu_count(), "versions": versions()}
    for source in (time_calls(), *map(time_steps, STEP_METHODS)):
        for row in source:
            rows.append(row)
            path.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
