# pyright: basic, reportPrivateImportUsage=false
"""The time of one denoising step, dense and with methods, checked against the dense model first."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil, lcm, prod
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from foveate.apps.bench.models import MODELS, Model, find_model
from foveate.apps.bench.table import TableColumn, megabytes, milliseconds, results_table
from foveate.diffusers.apply import apply
from foveate.methods import LLSA, ComposedMethod, HilbertA, Method, ToMA
from foveate.methods.base import Grid, TokenMerging, default_skip
from foveate.pipelines.checks import token_grid
from foveate.pipelines.lora import using
from foveate.pipelines.request import Request, denoiser
from foveate.pipelines.steps import Call, time_steps
from foveate.utils.device import choose_device, choose_dtype, dtype_name, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, now, peak_memory, time_calls

__all__ = ["TOLERANCE", "Setup", "Step", "bench_step", "in_part", "merging_part", "table_of"]

NO_CYCLE = ToMA(dst_every=1, weights_every=1)  # the schedule of a method whose steps are all alike
LEAST_STEPS = 10  # timed steps of a method that merges tokens
ONE_TILE, ALL_KEPT = HilbertA(tiles=1), ToMA(keep=0.999, weights="hard", skip=0)  # both must equal dense
EVERY_BLOCK = LLSA(top_k=128, enrich=False, min_tokens=0)  # so must this: the most blocks that kernels read
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class Step(NamedTuple):
    """One forward pass of a pipeline's denoiser.

    Attributes:
        pipe: The pipeline.
        call: Arguments of the forward pass.
        compiled: Whether the blocks are compiled.
        cuda_graphs: Whether the compiled blocks run as CUDA graphs.
    """

    pipe: Any
    call: Call
    compiled: bool = False
    cuda_graphs: bool = False

    def batch(self) -> int:
        """Number of samples."""
        return len(next(x for x in (*self.call.args, *self.call.kwargs.values()) if isinstance(x, Tensor) and x.ndim))

    def run(self) -> Tensor:
        """The prediction of the denoiser."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return self.call.run(denoiser(self.pipe))

    def run_as(self, number: int) -> None:
        """Run the forward pass as step `number` of a denoising run."""
        self.pipe.scheduler.set_begin_index(number)
        self.run()


class Setup(NamedTuple):
    """A model and the methods to time on it.

    Attributes:
        model: Description of the model.
        pipe: The pipeline.
        methods: Methods to time.
        text: Number of text tokens; None if the pipeline decides.
        cuda_graphs: See `Step.cuda_graphs`.
        about: Description for the JSON file.
    """

    model: Model
    pipe: Any
    methods: Sequence[Method | ComposedMethod]
    text: int | None
    cuda_graphs: bool
    about: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: str = "built-in",
        *,
        methods: Sequence[Method | ComposedMethod] = (),
        text: int | None = None,
        layers: int | None = None,
        compile: bool = False,
        cuda_graphs: bool = False,
        device: str = "auto",
        dtype: str = "auto",
    ) -> "Setup":
        """The model, loaded on the device.

        Args:
            model: A name in `MODELS`, or a pipeline's hub id or folder.
            methods: Methods to time besides dense. Empty: the defaults of the model.
            text: Number of text tokens. None: the model's usual number.
            layers: Number of blocks to build of a model of which a part may be timed, for example one larger than the
                memory. None: as many as fit. Token merging then skips the same share of first blocks.
            compile: Compile the repeated blocks.
            cuda_graphs: Compile the repeated blocks with mode="reduce-overhead", which runs them as CUDA graphs.
            device: See `choose_device`.
            dtype: See `choose_dtype`.

        Raises:
            ValueError: If the model is unknown or cannot be built in part, there is no method, or there is no GPU for
                CUDA graphs.
        """
        chosen, where = find_model(model), choose_device(device)
        if not (methods := methods or chosen.methods):
            raise ValueError(f"name the methods to time on {model}, for example --method hilberta --method toma")
        if cuda_graphs and where.type != "cuda":
            raise ValueError(f"CUDA graphs need an NVIDIA GPU, not {where.type}: leave --cuda-graphs out")
        if layers is not None and not 1 <= layers <= (chosen.layers or 0):
            parts = ", ".join(f"{name} (1 to {of.layers})" for name, of in MODELS.items() if of.layers)
            raise ValueError(f"{layers} layers cannot be built of {model}, only of {parts}: leave the layers out")
        part = {"layers": layers} if chosen.layers else {}
        pipe = chosen.build(where, choose_dtype(dtype, where), **part)
        network: Any = denoiser(pipe)
        if chosen.layers:
            built = len(network.transformer_blocks)
            methods = [in_part(method, built, chosen.layers) for method in methods]
            part = {"layers": built, "all_layers": chosen.layers}
        if compile or cuda_graphs:
            network.compile_repeated_blocks(fullgraph=True, **{"mode": "reduce-overhead"} if cuda_graphs else {})
        text = chosen.text if text is None else text
        about = {
            "what": f"one forward of {type(network).__name__} with {chosen.weights}",
            "model": model,
            "parameters": sum(p.numel() for p in network.parameters()),
            **part,
            "text_tokens": text,
            "device": where.type,
            "dtype": dtype_name(pipe.dtype),
            "compiled": compile or cuda_graphs,
            "cuda_graphs": cuda_graphs,
            "versions": versions(),
        }
        return cls(chosen, pipe, methods, text, cuda_graphs, about)

    def grid(self, size: tuple[int, int], frames: int | None = None) -> Grid:
        """(rows, columns) of image tokens for (height, width) in pixels; of a video (frames, rows, columns).

        Raises:
            ValueError: If the model has no such size or number of frames.
        """
        if self.model.grid is not None:
            return self.model.grid(size, frames)
        video, *image = token_grid(self.pipe, Request("", size, 1, None, 0, frames=frames))
        return (*image,) if frames is None else (video, *image)

    def step(self, grid: Grid) -> Step:
        """The forward pass with this grid of image tokens."""
        return Step(self.pipe, self.model.inputs(self.pipe, grid, self.text), self.about["compiled"], self.cuda_graphs)


@torch.no_grad()
def bench_step(
    setup: Setup, grids: Sequence[Grid], *, rounds: int = 9, track: Track = silent
) -> Iterator[dict[str, Any]]:
    """Time one forward pass of a denoiser, dense and with each method; yields the result after every new row.

    The result can be written as JSON. Dense and the methods that merge no tokens take turns; their time (`step_s`) is
    the median. The methods that merge tokens follow one by one, through whole cycles of their schedule; their time is
    the mean of these steps, plans included. Then dense is timed again: the difference to the first time is the drift
    of the machine. `enqueue_s` is the time until the forward pass returns, before the device is done: as long as it is
    shorter than `step_s`, the processor does not limit the step. On a GPU the forward pass is also timed as one CUDA
    graph (`graph_s`; for token merging a step that makes no plan), which shows the time without the cost of launching
    kernels. In a compiled model all methods are timed one by one, because some compile it anew; for methods that merge
    no tokens `step_s` is the median there too. A method that does not fit the model or stays dense at a size is named
    in `skipped`, and the others are timed.

    Args:
        setup: Model and methods.
        grids: (rows, columns) of image tokens, or (frames, rows, columns) of a video, one entry per size. For SDXL:
            sides of the largest feature maps with attention, 64 x 64 at 1024 px.
        rounds: Number of measurements of each method.
        track: Shows progress.

    Raises:
        ValueError: If a setting that must equal the dense model does not, or nothing can be timed.
    """
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    result = setup.about | {"rounds": rounds, "rows": rows, "skipped": skipped}
    for grid in grids:
        step, size = setup.step(grid), _size(grid)
        bounds: dict[str, float] = {}
        for method in setup.methods:
            try:
                bounds[repr(method)] = _flop_bound(step, method, size)
            except ValueError as reason:
                skipped.append({"grid": grid, "method": repr(method), "why": str(reason)})
        if not (methods := [method for method in setup.methods if repr(method) in bounds]):
            continue
        errors = _check(setup, step, grid, methods)
        dense = None
        for row in _measured(step, methods, rounds, size, track):
            dense = dense or row
            row = {"grid": grid, "image_tokens": prod(grid), "batch": step.batch(), **errors, **row}
            if layers := result.get("layers"):
                row["all_layers_s"] = row["step_s"] * result["all_layers"] / layers
            row["attention_flop_bound"] = bounds.get(row["method"], 1.0)
            row["speed_up"] = dense["step_s"] / row["step_s"]
            if dense["graph_s"] and row["graph_s"]:
                row["graph_speed_up"] = dense["graph_s"] / row["graph_s"]
            rows.append(row)
            yield result
    if not rows:
        raise ValueError(skipped[0]["why"])


def in_part(method: Method | ComposedMethod, layers: int, all_layers: int) -> Method | ComposedMethod:
    """The method for a model with some of its layers: token merging skips the same share of them as in the whole."""
    skip = round(default_skip(all_layers) * layers / all_layers)
    parts = [
        replace(part, skip=skip)
        if layers < all_layers and isinstance(part, TokenMerging) and part.skip is None
        else part
        for part in method.parts
    ]
    return parts[0] if len(parts) == 1 else ComposedMethod(tuple(parts))


def merging_part(method: Method | ComposedMethod) -> TokenMerging | None:
    """The part of a method that merges tokens; None if there is none."""
    return next((part for part in method.parts if isinstance(part, TokenMerging)), None)


# --- check ---


def _check(setup: Setup, step: Step, grid: Grid, methods: Sequence[Method | ComposedMethod]) -> dict[str, float]:
    """Relative differences from dense of settings that must equal it, one for each kind of method.

    LLSA is checked on a part of the grid if its kernels cannot read all of it.

    Raises:
        ValueError: If one is too large.
    """
    errors: dict[str, float] = {}
    for part in (part for method in methods for part in method.parts):
        name, exact = (
            ("every_block_error", EVERY_BLOCK)
            if isinstance(part, LLSA)
            else ("all_kept_error", ALL_KEPT)
            if isinstance(part, TokenMerging)
            else ("one_tile_error", ONE_TILE)
        )
        if name in errors:
            continue
        blocks: Any = EVERY_BLOCK.top_k  # a number, not a schedule
        checked = _part_of(grid, blocks * EVERY_BLOCK.block_size) if exact is EVERY_BLOCK else grid
        errors[name] = _difference(step if checked == grid else setup.step(checked), exact)
        if not errors[name] <= TOLERANCE[step.pipe.dtype]:  # also true of NaN
            raise ValueError(
                f"{exact.title} differs from dense by {errors[name]:.1e} at {_size(checked)}: not timing a wrong step"
            )
    return errors


def _size(grid: Grid) -> str:
    return f"{' x '.join(map(str, grid))} tokens"


def _part_of(grid: Grid, tokens: int) -> Grid:
    """The grid, its longest sides halved until it has at most this many tokens."""
    sides = list(grid)
    while prod(sides) > tokens:
        longest = sides.index(max(sides))
        sides[longest] //= 2
    return tuple(sides)


def _difference(step: Step, method: Method) -> float:
    """Relative difference between the outputs without and with a method; neither is compiled."""
    with torch.compiler.set_stance("force_eager"):
        dense = step.run()
        with apply(step.pipe, method):
            other = step.run()
    return ((other - dense).float().norm() / dense.float().norm()).item()


def _flop_bound(step: Step, method: Method | ComposedMethod, size: str) -> float:
    """FLOPs of dense attention divided by FLOPs with the method, an upper bound of attention's speed-up.

    Raises:
        ValueError: If the method stays dense.
    """
    with torch.compiler.set_stance("force_eager"), apply(step.pipe, *method.parts) as run:
        step.run()
        layers = run.summary().layers
    if all(layer.why for layer in layers):
        raise ValueError(f"{method.title} stays dense at {size}: {layers[-1].why}")
    return 1 / (1 - mean(layer.true for layer in layers))


# --- time ---


def _measured(
    step: Step, methods: Sequence[Method | ComposedMethod], rounds: int, size: str, track: Track
) -> Iterator[dict[str, Any]]:
    in_turns = [None, *(method for method in methods if not (merging_part(method) or step.compiled))]
    yield from _in_turns(step, in_turns, rounds, track(size, len(in_turns) * (rounds + 1)))
    for method in methods:
        if method not in in_turns:
            yield _alone(step, method, rounds, track)
    if len(in_turns) <= len(methods):
        (row,) = _in_turns(step, [None], rounds, track("dense, again", rounds + 1))
        yield row | {"variant": "dense, again"}


def _in_turns(
    step: Step, methods: Sequence[Method | ComposedMethod | None], rounds: int, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """Rows of methods whose steps are all alike, timed in turns."""
    torch._dynamo.reset()  # PyTorch compiles a block for a limited number of methods and sizes
    alone: list[tuple[int | None, float, float | None]] = []
    for method in methods:
        with using(step.pipe, method):
            peak = peak_memory(step.run, step.pipe.device)
            alone.append((peak, _enqueue_seconds(step, step.run, rounds), _graph_seconds(step, step.run, rounds)))
    seconds = zip(*time_steps(step.pipe, step.call, methods, rounds, advance), strict=True)
    return [
        _row(method, median(taken), taken, *rest) for method, taken, rest in zip(methods, seconds, alone, strict=True)
    ]


def _alone(step: Step, method: Method | ComposedMethod, rounds: int, track: Track) -> dict[str, Any]:
    """Row of one method, timed by itself. Token merging is timed over whole cycles of its schedule, with its plans."""
    merging = merging_part(method) or NO_CYCLE
    device, cycle = step.pipe.device, lcm(merging.dst_every, merging.merge_every)
    steps = cycle * ceil(max(rounds, LEAST_STEPS) / cycle)
    advance = track(method.title, steps)
    torch._dynamo.reset()  # as above
    taken: list[float] = []
    with apply(step.pipe, *method.parts) as run, run.image(step.pipe):
        for _ in range(1 + 2 * step.cuda_graphs):  # CUDA graphs are recorded the second time
            for number in sorted({0, 1, merging.merge_every, merging.weights_every}):  # compiles what a cycle runs
                step.run_as(number)
        peak = peak_memory(lambda: step.run_as(0), device)
        step.run_as(0)
        for number in range(1, steps + 1):
            start = now(device)
            step.run_as(number)
            taken.append(now(device) - start)
            advance()
        again = lambda: step.run_as(steps)  # noqa: E731
        enqueue, graph = _enqueue_seconds(step, again, rounds), _graph_seconds(step, again, rounds)
    step.pipe.scheduler.set_begin_index(0)
    return _row(method, (mean if merging_part(method) else median)(taken), taken, peak, enqueue, graph)


def _enqueue_seconds(step: Step, forward: Callable[[], object], rounds: int) -> float:
    """Median time until a forward pass returns, before the device is done, of three or fewer."""
    taken: list[float] = []
    for _ in range(min(rounds, 3)):
        start = now(step.pipe.device)
        forward()
        taken.append(time.perf_counter() - start)
    return median(taken)


def _graph_seconds(step: Step, forward: Callable[[], object], rounds: int) -> float | None:
    """Median time of a forward pass as one CUDA graph; None without a GPU, or if it cannot be captured."""
    device = step.pipe.device
    if device.type != "cuda" or step.cuda_graphs:
        return None
    try:
        forward()
        replay = captured(forward, device)
    except RuntimeError:  # the host reads a value of the device somewhere in it
        return None
    return median(time_calls([replay], rounds, device)[0])


def _row(
    method: Method | ComposedMethod | None,
    seconds: float,
    taken: Sequence[float],
    peak: int | None,
    enqueue: float,
    graph: float | None,
) -> dict[str, Any]:
    return {
        "variant": method.title if method else "dense",
        "method": repr(method) if method else "dense",
        "step_s": seconds,
        "median_s": median(taken),
        "fastest_s": min(taken),
        "slowest_s": max(taken),
        "forwards": len(taken),
        "enqueue_s": enqueue,
        "graph_s": graph,
        "peak_bytes": peak,
    }


COLUMNS: list[TableColumn] = [
    ("tokens", "image_tokens", "{:,}".format),
    ("variant", "variant", str),
    ("ms", "step_s", milliseconds),
    ("ms, all layers", "all_layers_s", milliseconds),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("enqueued in, ms", "enqueue_s", milliseconds),
    ("CUDA graph, ms", "graph_s", milliseconds),
    ("speed-up", "graph_speed_up", "{:.2f}x".format),
    ("bound of attention", "attention_flop_bound", "{:.2f}x".format),
    ("MB", "peak_bytes", megabytes),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal."""
    return results_table(result["rows"], COLUMNS)
