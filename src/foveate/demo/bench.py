# pyright: basic, reportPrivateImportUsage=false
"""One denoising step, dense and with methods: check, then time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, lcm
from statistics import mean, median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from lab.bench.reconstruction import FEATURES, reconstruction_error
from rich.table import Column, Table
from torch.nn.functional import scaled_dot_product_attention

from foveate.demo.random_models import MODELS, Model
from foveate.diffusers.apply import apply
from foveate.diffusers.lora import using
from foveate.diffusers.pipelines import Call, denoiser, time_steps
from foveate.methods import LLSA, ComposedMethod, HilbertA, Method, ToMA
from foveate.methods.base import TokenMerging
from foveate.ops.joint_attention import joint_attention
from foveate.utils.device import choose_device, choose_dtype, now, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, peak_memory, time_calls, time_shares

__all__ = ["bench_step", "table_of"]

MethodLike = Method | ComposedMethod
STEPS = 10  # of a run that merges, at least
ONE_TILE, ALL_KEPT = HilbertA(tiles=1), ToMA(keep=0.999, weights="hard", skip=0)  # must be dense
EVERY_BLOCK = LLSA(top_k=2**20, enrich=False, min_tokens=0)  # likewise
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
MERGE, PLAN = ("foveate::region_matmul", "foveate::region_update"), "foveate::plan"  # what a profile calls them


@torch.no_grad()
def bench_step(
    sides: Sequence[int],
    *,
    model: str = "built-in",
    methods: Sequence[MethodLike] = (),
    text: int | None = None,
    compile: bool = False,
    rounds: int = 9,
    device: str = "auto",
    dtype: str = "auto",
    track: Track = silent,
) -> Iterator[dict[str, Any]]:
    """With every row more the times so far of one forward of a denoiser with random weights, ready for JSON.

    The reorder of the tokens is part of a forward. Dense and the methods that merge nothing take turns. Those that
    merge tokens come after them, one by one, through whole cycles of their schedule; their time is the mean over those
    steps, plans included. Then dense is timed again: what it differs by, the machine has drifted.

    On a GPU a forward is timed as one CUDA graph too (`graph_s`; of those that merge, one that makes no plan): what it
    takes where launching is not what takes longest.

    A profile of one more cycle tells which parts of the time went into the ops that merge and unmerge
    (`merge_share`) and into plans (`plan_share`). They are 0 where that is compiled into other code, or done by other
    ops: on a CPU, and by methods that merge by best match. In a UNet the quality of a method is judged by what merging
    and unmerging leave of random and of smooth features: see `reconstruction_error`.

    Args:
        sides: Image tokens along each side; in SDXL along those of the largest maps with attention, 64 at 1024 px.
        model: One of `MODELS`.
        methods: What to time besides dense. None of them: the model's own list.
        text: Text tokens. None takes the model's usual number.
        compile: Compile the repeated blocks.
        rounds: How often to time each that takes turns; of those that merge so many steps at least.
        device: See `choose_device`.
        dtype: See `choose_dtype`.
        track: Shows progress.

    Raises:
        ValueError: If there is no such model, a method does not fit it or stays dense, or one tile, merging that
            keeps every token, or picking every block does not give the dense step.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}: choose one of {', '.join(MODELS)}")
    chosen, where = MODELS[model], choose_device(device)
    text = chosen.text if text is None else text
    pipe = chosen.build(where, choose_dtype(dtype, where))
    network: Any = denoiser(pipe)
    if compile:
        network.compile_repeated_blocks(fullgraph=True)
    rows: list[dict[str, Any]] = []
    result = {
        "what": f"one forward of {type(network).__name__} with random weights",
        "model": model,
        "parameters": sum(p.numel() for p in network.parameters()),
        "text_tokens": text,
        "device": where.type,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "compiled": compile,
        "rounds": rounds,
        "rows": rows,
        "versions": versions(),
    }
    for side in sides:
        for row in _rows(pipe, chosen, side, text, methods or chosen.methods, rounds, track):
            rows.append(row)
            yield result


def _rows(
    pipe: Any, model: Model, side: int, text: int, ways: Sequence[MethodLike], rounds: int, track: Track
) -> Iterator[dict[str, Any]]:
    step = model.step(denoiser(pipe), side, text)
    about = {"image_tokens": side * side, "batch": len(next(iter(step.values())))}
    about |= _check(pipe, step, ways, f"{side} x {side} tokens")
    dense = None
    for row in _measured(pipe, step, side, text, ways, rounds, track):
        dense = dense or row
        gains = {"speed_up": dense["step_s"] / row["step_s"]}
        if dense["graph_s"] and row["graph_s"]:
            gains["graph_speed_up"] = dense["graph_s"] / row["graph_s"]
        yield about | row | gains


def _measured(
    pipe: Any, step: dict[str, Any], side: int, text: int, ways: Sequence[MethodLike], rounds: int, track: Track
) -> Iterator[dict[str, Any]]:
    merging = [way for way in ways if _merging(way)]
    in_turns = [None, *(way for way in ways if not _merging(way))]
    rows = _in_turns(pipe, step, in_turns, rounds, track(f"{side} x {side} tokens", len(in_turns) * (rounds + 1)))
    yield from _attention(denoiser(pipe), rows, in_turns, side, text, rounds) if _is_flux(pipe) else rows
    for way in merging:
        row = _scheduled(pipe, step, way, rounds, track)
        yield row if _is_flux(pipe) else row | _reconstruction(way, side, pipe.device)
    if merging:
        (row,) = _in_turns(pipe, step, [None], rounds, track("dense, again", rounds + 1))
        yield row | {"variant": "dense, again"}


def _is_flux(pipe: Any) -> bool:
    return isinstance(denoiser(pipe), FluxTransformer2DModel)


def _merging(way: MethodLike) -> list[TokenMerging]:
    return [part for part in way.parts if isinstance(part, TokenMerging)]


def _row(
    way: MethodLike | None, seconds: float, taken: Sequence[float], peak: int | None, graph: float | None
) -> dict[str, Any]:
    return {
        "variant": way.title if way else "dense",
        "method": repr(way) if way else "dense",
        "step_s": seconds,
        "median_s": median(taken),
        "fastest_s": min(taken),
        "slowest_s": max(taken),
        "forwards": len(taken),
        "graph_s": graph,
        "peak_bytes": peak,
    }


def _reconstruction(way: MethodLike, side: int, device: torch.device) -> dict[str, float]:
    (merging,) = _merging(way)
    return {
        f"reconstruction_{features}": reconstruction_error(merging, features, side, device) for features in FEATURES
    }


# --- check ---


def _check(pipe: Any, step: dict[str, Any], ways: Sequence[MethodLike], size: str) -> dict[str, float]:
    """The errors of what must be dense.

    Raises:
        ValueError: If one is too large, or what is to be timed does not work.
    """
    exact: dict[str, Method] = {"one_tile_error": ONE_TILE, "all_kept_error": ALL_KEPT}
    exact |= {"every_block_error": EVERY_BLOCK} if any(isinstance(p, LLSA) for way in ways for p in way.parts) else {}
    errors = {name: _difference(pipe, step, method) for name, method in exact.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE[pipe.dtype]:  # NaN is wrong too
            raise ValueError(
                f"{exact[name].title} differs from dense by {error:.1e} at {size}: not timing a wrong step"
            )
    for way in ways:
        with torch.compiler.set_stance("force_eager"), apply(pipe, *way.parts) as run:
            denoiser(pipe)(**step)
            if not run.plans():
                raise ValueError(f"{way.title} stays dense at {size}: {run.summary().layers[-1].why}")
    return errors


def _difference(pipe: Any, step: dict[str, Any], method: Method) -> float:
    """Relative difference between the dense step and one with a method, neither of them compiled."""
    with torch.compiler.set_stance("force_eager"):
        dense = denoiser(pipe)(**step)[0]
        with apply(pipe, method):
            other = denoiser(pipe)(**step)[0]
    return ((other - dense).float().norm() / dense.float().norm()).item()


# --- time ---


def _in_turns(
    pipe: Any, step: dict[str, Any], ways: Sequence[MethodLike | None], rounds: int, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """Rows of what does the same in every step."""
    alone: list[tuple[int | None, float | None]] = []
    for way in ways:
        with using(pipe, way):
            forward = partial(denoiser(pipe), **step)
            alone.append((peak_memory(forward, pipe.device), _graph_seconds(forward, rounds, pipe.device)))
    seconds = zip(*time_steps(pipe, Call((), step), ways, rounds, advance), strict=True)
    return [_row(way, median(taken), taken, *both) for way, taken, both in zip(ways, seconds, alone, strict=True)]


def _graph_seconds(forward: Callable[[], object], rounds: int, device: torch.device) -> float | None:
    """Median time of a forward as one CUDA graph; None where there are none, or it cannot be captured."""
    if device.type != "cuda":
        return None
    try:
        forward()
        replay = captured(forward, device)
    except RuntimeError:  # something in it waits for the device
        return None
    return median(time_calls([replay], rounds, device)[0])


def _scheduled(pipe: Any, step: dict[str, Any], way: MethodLike, rounds: int, track: Track) -> dict[str, Any]:
    """The row of a run that merges: whole cycles of its schedule, each plan made when its time comes."""
    (merging,) = _merging(way)
    cycle = lcm(merging.dst_every, merging.merge_every)
    steps = cycle * ceil(max(rounds, STEPS) / cycle)
    advance = track(way.title, steps)

    def forward(number: int) -> None:
        pipe.scheduler.set_begin_index(number)
        denoiser(pipe)(**step)

    with apply(pipe, *way.parts):
        for number in sorted({0, 1, merging.merge_every, merging.weights_every}):  # compile all that a run does
            forward(number)
        peak = peak_memory(lambda: forward(0), pipe.device)
        forward(0)
        taken: list[float] = []
        for number in range(1, steps + 1):
            began = now(pipe.device)
            forward(number)
            taken.append(now(pipe.device) - began)
            advance()
        graph = _graph_seconds(lambda: forward(steps), rounds, pipe.device)
        one_more = range(steps + 1, steps + cycle + 1)
        *merge, plan = time_shares(lambda: [forward(number) for number in one_more], [*MERGE, PLAN], pipe.device)
    pipe.scheduler.set_begin_index(0)
    return _row(way, mean(taken), taken, peak, graph) | {"merge_share": sum(merge), "plan_share": plan}


def _attention(
    transformer: Any, rows: Sequence[dict[str, Any]], ways: Sequence[Any], side: int, text: int, rounds: int
) -> list[dict[str, Any]]:
    """The rows, with what attention alone takes: softmax(q k) v and nothing around it."""
    config: Any = transformer.config
    shape = 1, side * side + text, config.num_attention_heads, config.attention_head_dim
    q, k, v = (
        torch.randn(shape, device=transformer.device, dtype=transformer.dtype).transpose(1, 2) for _ in range(3)
    )
    tables = [way.plan(((side, side),), text).tables for way in ways[1:]]
    calls = [
        partial(scaled_dot_product_attention, q, k, v),
        *(partial(joint_attention, q, k, v, first) for first, *_ in tables),
    ]
    for call in calls:
        call()
    calls = [captured(call, transformer.device) for call in calls]
    alone = [median(taken) for taken in time_calls(calls, rounds, transformer.device)]
    bounds = [1.0, *(1 / (1 - mean(table.sparsity() for table in phases)) for phases in tables)]
    layers = len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)
    return [
        row
        | {
            "attention_share": layers * seconds / row["step_s"],
            "attention_speed_up": alone[0] / seconds,
            "attention_flop_bound": bound,
        }
        for row, seconds, bound in zip(rows, alone, bounds, strict=True)
    ]


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("tokens", "image_tokens", "{:,}".format),
    ("variant", "variant", str),
    ("ms", "step_s", lambda seconds: f"{1e3 * seconds:.4g}"),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("as a graph, ms", "graph_s", lambda seconds: f"{1e3 * seconds:.4g}"),
    ("speed-up", "graph_speed_up", "{:.2f}x".format),
    ("attention", "attention_share", "{:.0%}".format),
    ("its speed-up", "attention_speed_up", "{:.2f}x".format),
    ("FLOP bound", "attention_flop_bound", "{:.2f}x".format),
    ("merging", "merge_share", "{:.1%}".format),
    ("plans", "plan_share", "{:.1%}".format),
    ("error, random", "reconstruction_random", "{:.3f}".format),
    ("error, smooth", "reconstruction_smooth", "{:.3f}".format),
    ("MB", "peak_bytes", lambda count: f"{count / 1e6:,.0f}"),
]


def table_of(result: dict[str, Any]) -> Table:
    """The measurements, to print: the columns that there are numbers for."""
    shown = [column for column in COLUMNS if any(row.get(column[1]) for row in result["rows"])]
    table = Table(*(Column(title, overflow="fold") for title, _, _ in shown))
    for row in result["rows"]:
        table.add_row(*(show(row[field]) if row.get(field) else "" for _, field, show in shown))
    return table
