# pyright: basic, reportOptionalMemberAccess=false
"""How long a whole run takes with a step cache, with a method and with both, added up from the times of its steps.

python -m lab.bench.cached_run lab/results --method toma:keep=0.8 --cache-computed 0.45 --computed 0.5

Weights are random, so the cache cannot tell which steps change little: the fractions of computed steps are given, as
`lab.quality.joint` found them. The method leaves the steps before `--start` dense.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from foveate.apps.bench.models import find_model
from foveate.diffusers.apply import apply
from foveate.diffusers.preset import Preset, StepCache, describe
from foveate.methods import read_method
from foveate.pipelines.request import denoiser
from foveate.pipelines.steps import counting
from foveate.utils.device import choose_device, choose_dtype, versions
from foveate.utils.timing import now
from lab.quality.common import Commit, save_result

ALWAYS, NEVER = StepCache(threshold=float("inf")), StepCache(threshold=0, start_percent=1.0)


def main(
    out: Annotated[Path, typer.Argument(help="Folder of the result.")] = Path("lab/results"),
    model: Annotated[str, typer.Option(help="See `foveate bench step --help`.")] = "flux-dev",
    sides: Annotated[str, typer.Option(help="Sides of the image in tokens.")] = "64,128",
    steps: Annotated[int, typer.Option(help="Denoising steps of a run.")] = 28,
    method: Annotated[str, typer.Option(help="Method, as in `foveate generate`.")] = "toma:keep=0.75",
    start: Annotated[
        float, typer.Option(help="Fraction of the run before which the method leaves steps dense.")
    ] = 0.0,
    method_alone: Annotated[str, typer.Option(help="Method without a cache, if it is another one.")] = "",
    cache_computed: Annotated[float, typer.Option(help="Fraction of computed steps with the cache alone.")] = 0.5,
    computed: Annotated[float, typer.Option(help="Fraction of computed steps with cache and method.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="Timed steps; the median counts.")] = 5,
    commit: Commit = "",
) -> None:
    """Time the steps and write the result."""
    if min(cache_computed, computed) < start:
        raise typer.BadParameter(f"all steps before --start {start} are computed: give fractions of {start} or more")
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    kind = find_model(model)
    pipe = kind.build(device, dtype)
    together, alone = read_method(method), read_method(method_alone or method)
    rows: list[dict[str, Any]] = []
    for side in map(int, sides.split(",")):
        step = Timed(pipe, kind.inputs(pipe, (side, side), kind.text), rounds)
        dense, skipped = step.dense(), step.skipped(())
        sparse, beside = step.computed(alone.parts, None), step.computed(together.parts, NEVER)
        sparse_skipped = step.skipped(together.parts)
        late, runs = round(start * steps), {"dense": steps * dense}
        counts = {"cache": round(cache_computed * steps), "both": round(computed * steps)}
        runs["cache"] = counts["cache"] * dense + (steps - counts["cache"]) * skipped
        runs["method"] = late * dense + (steps - late) * sparse
        runs["both"] = late * dense + (counts["both"] - late) * beside + (steps - counts["both"]) * sparse_skipped
        rows.append(
            {
                "case": f"{16 * side} px", "dense_step": dense, "skipped_step": skipped, "method_step": sparse,
                "method_step_beside_cache": beside, "skipped_step_with_method": sparse_skipped, "runs": runs,
                "gain_over_cache": runs["cache"] / runs["both"], "gain": runs["dense"] / runs["both"],
            }
        )  # fmt: skip
        Console().print(rows[-1])
    settings = {
        "model": model, "steps": steps, "method": repr(together), "method_alone": repr(alone), "start": start,
        "cache_computed": cache_computed, "computed": computed,
    }  # fmt: skip
    result = {"settings": settings, "rows": rows, "versions": versions()}
    save_result(f"cached-run-{model}-{device.type}", result, commit)


class Timed:
    """Times of steps of one pipeline, in seconds.

    Args:
        pipe: The pipeline.
        call: Arguments of a forward pass.
        rounds: Timed steps of each kind.
    """

    def __init__(self, pipe: Any, call: Any, rounds: int) -> None:
        self.pipe, self.call, self.rounds = pipe, call, rounds

    def dense(self) -> float:
        """A dense step."""
        return median(self._step() for _ in range(self.rounds + 1))

    def computed(self, methods: tuple[Any, ...], cache: StepCache | None) -> float:
        """A step with methods; the time of a plan is divided among the steps that share it."""
        pairs = self._pairs(methods, cache)
        first, again = (median(times) for times in zip(*pairs, strict=True))
        shared = max(getattr(method, "weights_every", 0) for method in methods) or 1
        return again + max(0.0, first - again) / shared

    def skipped(self, methods: tuple[Any, ...]) -> float:
        """A step that the cache skips."""
        return median(skipped for _, skipped in self._pairs(methods, ALWAYS))

    def _pairs(self, methods: tuple[Any, ...], cache: StepCache | None) -> list[tuple[float, float]]:
        """Times of the first and the second step of an image."""
        preset = Preset(methods=methods, cache=cache, models=[describe(denoiser(self.pipe))], size=(0, 0))
        found: list[tuple[float, float]] = []
        with apply(self.pipe, preset) as run:
            for _ in range(self.rounds + 1):  # the first one compiles kernels
                with counting(run) as begin_step:
                    first = self._step()
                    begin_step(1)
                    found.append((first, self._step()))
        return found[1:]

    def _step(self) -> float:
        began = now(self.pipe.device)
        self.call.run(denoiser(self.pipe))
        return now(self.pipe.device) - began


if __name__ == "__main__":
    typer.run(main)
