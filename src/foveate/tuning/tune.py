"""Search for the fastest setting whose images stay near the dense ones.

1. Every candidate is measured: error and time of a step, error of each group of layers, on recorded dense steps; the
   steps that each step cache skips in an image, and its error.
2. One candidate shows how much an error in each part of the run matters to the image.
3. From these the error and time of every setting (candidate, steps, dense layers, step cache) are predicted, and of
   schedules that change from one candidate to another during the run; the Pareto front is kept.
4. Whole images decide: bisection on calibration prompts, then held-out prompts, with settings ever nearer to dense
   until every image is within the budget.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import isfinite, isnan, sqrt
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from foveate.diffusers.preset import Preset, StepCache, describe
from foveate.methods import LLSA, ComposedMethod, HilbertA, Method, ToMA
from foveate.methods.base import layer_ranges
from foveate.utils.progress import Track, silent

__all__ = ["CACHES", "CANDIDATES", "Budget", "Setting", "check", "settings", "tune"]

CANDIDATES: tuple[Method | ComposedMethod, ...] = (
    ToMA(keep=0.75),
    ToMA(keep=0.5),
    HilbertA(tiles=4),
    HilbertA(tiles=16),
    LLSA(),
    ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5))),
)
"""Methods that `tune` tries by default."""

CACHES = tuple(StepCache(threshold=threshold, start_percent=0.2) for threshold in (0.1, 0.15, 0.2, 0.3, 0.5))
"""Step caches that `tune` tries by default, alone and with every method."""

LEAST_GAIN = 1.03  # times faster than dense; a smaller gain is not worth a changed image
NOTCH = 0.9  # each setting of the search has at most this fraction of the predicted error of the next faster one
TENTHS = 10  # start_percent and end_percent are multiples of 1/10
SCORE_NAMES = {"ssim": "SSIM", "psnr": "PSNR"}


@dataclass(frozen=True)
class Budget:
    """Least similarity of every image to the dense image of the same seed.

    Examples:
        >>> Budget(0.95)  # SSIM
        Budget(at_least=0.95, score='ssim')
        >>> Budget(30, "psnr").name
        'PSNR'

    Attributes:
        at_least: Least score of every image. ``-math.inf`` accepts any image, so the fastest setting wins.
        score: "ssim", "psnr" (in dB), or a function of (image, dense image), larger for more similar images. The
            frames of a video are stacked vertically.

    Raises:
        ValueError: If the score is unknown or can never reach `at_least`.
    """

    at_least: float
    score: Literal["ssim", "psnr"] | Callable[[Image.Image, Image.Image], float] = "ssim"

    def __post_init__(self) -> None:
        if not callable(self.score) and self.score not in SCORE_NAMES:
            raise ValueError(
                f"score must be one of {', '.join(SCORE_NAMES)} or a function of two images, not {self.score!r}"
            )
        if not isinstance(self.at_least, int | float):
            raise ValueError(f"a budget is a number such as 0.95, not {self.at_least!r}")
        if isnan(self.at_least) or (self.score == "ssim" and self.at_least > 1):
            raise ValueError(f"SSIM is 1 at most, and a budget a number: {self.at_least} cannot be reached")

    @property
    def name(self) -> str:
        """Name of the score."""
        return getattr(self.score, "__name__", "score") if callable(self.score) else SCORE_NAMES[self.score]

    def of(self, picture: Image.Image, dense: Image.Image) -> float:
        """Score of an image against the dense one."""
        if callable(self.score):
            return float(self.score(picture, dense))
        from foveate.tuning import similarity

        return getattr(similarity, self.score)(picture, dense)


class Setting(NamedTuple):
    """A method in some steps and layers, a step cache, or both.

    Attributes:
        method: The method with `dense_layers`, `start_percent` and `end_percent`; None: the step cache alone.
        cache: The step cache; None: all steps are computed.
        error: Predicted error of an image: root mean square, pixels from 0 to 1.
        time: Predicted time of an image's steps, as a fraction of the dense ones.
    """

    method: Method | ComposedMethod | None
    cache: StepCache | None
    error: float
    time: float

    @property
    def title(self) -> str:
        """Titles of the method, with steps and layers, and of the step cache, with the predicted speed-up."""
        titles = (part.title for part in (self.method, self.cache) if part)
        return f"{' + '.join(titles)} ({1 / self.time:.2f}x)"

    def in_step(self, progress: float) -> Method | ComposedMethod | None:
        """What is active at this fraction of the steps, without schedules; None: nothing."""
        if self.method is None or not self.method.parts[0].covers(progress):
            return None
        return self.method.at_progress(progress) if isinstance(self.method, Method) else self.method

    def active(self, steps: int) -> Any:
        """Whether the method is active in each step [steps]."""
        return np.array([self.in_step(i / steps) is not None for i in range(steps)])


def tune(
    pipe: Any,
    prompts: Sequence[str],
    budget: Budget,
    *,
    size: tuple[int, int],
    steps: int,
    guidance: float | None = None,
    frames: int | None = None,
    seed: int = 0,
    methods: Sequence[Method | ComposedMethod] = CANDIDATES,
    caches: Sequence[StepCache] = CACHES,
    out: Path | str | None = None,
    say: Callable[[str], None] = lambda line: None,
    track: Track = silent,
) -> Preset:
    """Find the fastest setting on this machine whose images are within the budget, on held-out prompts too.

    Examples:
        >>> preset = foveate.tune(pipe, prompts, foveate.Budget(0.95), size=(1024, 1024), steps=28, out="tuned")
        >>> preset.save("preset.json")

    Args:
        pipe: A pipeline of diffusers.
        prompts: Two prompts or more. A third of them is for calibration, the others are held out.
        budget: Least similarity of every held-out image to the dense one.
        size: (height, width) in pixels.
        steps: Number of denoising steps.
        guidance: Guidance scale; None is the pipeline's default.
        frames: Frames of a video; None is the pipeline's default.
        seed: Seed of the first prompt; each next prompt has the next seed.
        methods: Methods to try, alone or composed. `tune` sets their steps and layers, and tries schedules of two that
            differ in their number of tiles, top_k or fraction to keep only.
        caches: Step caches to try, alone and with every method; none for models that have a cache of their own.
        out: Folder for images and measurements; an interrupted run resumes from it, and a run with another budget
            reuses them. None keeps nothing.
        say: Called with a line about every result.
        track: Shows progress.

    Raises:
        ValueError: If an argument is invalid, the model has no card, no candidate saves time, or no faster setting
            is within the budget; the message names the nearest one.
    """
    check(prompts, methods, caches)
    if not isinstance(budget, Budget):
        raise ValueError(f"budget must be a foveate.Budget, such as foveate.Budget(0.95), not {budget!r}")
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise ValueError(f"size is (height, width) in pixels, such as (1024, 1024), not {size!r}")
    if steps < 1:
        raise ValueError(f"steps is a number of denoising steps, 1 or more, not {steps}")
    from foveate.pipelines.checks import check_request
    from foveate.pipelines.request import Request
    from foveate.tuning.measure import Measurements

    first = Request("", size, steps, guidance, seed, frames=frames)
    check_request(pipe, first)
    requests = [first._replace(prompt=prompt, seed=seed + i) for i, prompt in enumerate(prompts)]
    with TemporaryDirectory() as folder:
        calibration = max(1, len(prompts) // 3)
        measured = Measurements(pipe, requests, calibration, Path(out or folder), track)
        return _Search(measured, budget, calibration, say).run(methods, caches)


def settings(
    methods: Sequence[Method | ComposedMethod],
    costs: dict[Any, dict[str, Any]],
    layers: dict[Any, list[dict[str, Any]]],
    weights: Any,
    caches: dict[StepCache, dict[str, Any]],
    skipped: float,
) -> list[Setting]:
    """Pareto front of the settings in predicted error and time, the fastest first.

    Errors of steps, layers and the step cache are assumed independent: their squares add up.

    Args:
        methods: The methods.
        costs: `Measurements.cost` of each method.
        layers: `Measurements.layers` of each method.
        weights: Ratio of the image's error to the prediction's error, for each step.
        caches: `Measurements.cache` of each step cache.
        skipped: Time of a skipped step, as a fraction of a dense one.
    """
    steps = len(weights)
    cached: list[tuple[StepCache | None, Any, float]] = [(None, np.ones(steps), 0.0)]
    cached += [(cache, np.array(one["computed"]), one["picture_error"] ** 2) for cache, one in caches.items()]
    found = [Setting(None, cache, sqrt(error), _time(computed, skipped)) for cache, computed, error in cached[1:]]
    for method in methods:
        cost = costs[method]
        squares = (weights * _by_step(cost, steps)) ** 2
        for limited, active, error_left, saving_left in _limited(method, layers[method], steps):
            ratio = 1 - (1 - cost["ratio"]) * saving_left
            for cache, computed, error in cached:
                whole = sqrt(error + (squares * computed)[active].sum() * error_left)
                found.append(Setting(limited, cache, whole, _time(computed, skipped, np.where(active, ratio, 1.0))))
    for scheduled, in_steps in _schedules(methods, steps):
        ratios = np.array([costs[method]["ratio"] if method else 1.0 for method in in_steps])
        by_step = [_by_step(costs[method], steps)[i] if method else 0.0 for i, method in enumerate(in_steps)]
        squares = (weights * np.array(by_step)) ** 2
        for cache, computed, error in cached:
            whole = sqrt(error + (squares * computed).sum())
            found.append(Setting(scheduled, cache, whole, _time(computed, skipped, ratios)))
    front: list[Setting] = []
    for setting in sorted(found, key=lambda setting: (setting.time, setting.error)):
        if setting.time * LEAST_GAIN <= 1 and (not front or setting.error < NOTCH * front[-1].error):
            front.append(setting)
    return front


def _limited(
    method: Method | ComposedMethod, groups: list[dict[str, Any]], steps: int
) -> Iterator[tuple[Any, Any, float, float]]:
    """A method in all choices of layers and steps.

    Yields the method, its active steps [steps], and the remaining fractions of the squared error and of the time saved
    in a step.
    """
    from foveate.pipelines.lora import throughout

    for dense, error_left, saving_left in _dense_layers(groups):
        for start in range(TENTHS):
            for end in range(TENTHS, start, -1):  # of equal ones the first stays
                limited = throughout(method, start / TENTHS, end / TENTHS, dense_layers=layer_ranges(dense))
                active = np.array([limited.parts[0].covers(step / steps) for step in range(steps)])
                if active.any():
                    yield limited, active, error_left, saving_left


def _schedules(methods: Sequence[Method | ComposedMethod], steps: int) -> Iterator[tuple[Method, list[Method | None]]]:
    """Schedules of two methods that differ in their scheduled option only, dense before the first begins.

    Yields the method, and the one of `methods` in each step [steps], None where it is dense.
    """
    plain = [method for method in methods if isinstance(method, Method) and method.scheduled]
    for first, then in permutations(plain, 2):
        name, after = first.scheduled, then.settings[0]
        if type(first) is not type(then) or replace(first, **{name: after}) != then:
            continue
        for start, change in combinations(range(TENTHS), 2):
            late = [(0.0, "dense")] if start else []
            schedule = *late, (start / TENTHS, first.settings[0]), (change / TENTHS, after)
            in_steps = [then if i * TENTHS >= change * steps else first if i * TENTHS >= start * steps else None
                        for i in range(steps)]  # fmt: skip
            yield replace(first, **{name: schedule}), in_steps


def _time(computed: Any, skipped: float, ratios: Any = 1.0) -> float:
    """Time of an image's steps, as a fraction of the dense ones.

    Args:
        computed: For each step, the fraction of its forward passes that are computed, not skipped [steps].
        skipped: Time of a skipped step, as a fraction of a dense one.
        ratios: Time of each computed step, as a fraction of a dense one [steps].
    """
    return float(np.mean(computed * ratios + (1 - computed) * skipped))


def _by_step(cost: dict[str, Any], steps: int) -> Any:
    """The error of each step, interpolated between the measured ones [steps]."""
    return np.interp(range(steps), cost["steps"], cost["errors"])


def _weights(parts: list[dict[str, Any]], errors: Any) -> Any:
    """Ratio of the image's error to the prediction's error in each step [steps]."""
    weights = np.zeros(len(errors))
    for part in parts:
        weights[part["steps"]] = part["picture_error"] / max(sqrt((errors[part["steps"]] ** 2).sum()), 1e-12)
    return weights


def _dense_layers(groups: list[dict[str, Any]]) -> Iterator[tuple[list[int], float, float]]:
    """Growing sets of dense layers, beginning with the layers of the most error per time saved.

    Yields the layers, and the remaining fractions of the squared error and of the time saved.
    """
    useful = [group for group in groups if group["saved"] > 0]
    error, saved = sum(g["prediction_error"] ** 2 for g in useful), sum(g["saved"] for g in useful)
    yield [], 1.0, 1.0
    if not error or not saved:
        return
    dense: list[int] = []
    error_left = saving_left = 1.0
    for group in sorted(useful, key=lambda g: g["saved"] / max(g["prediction_error"], 1e-12) ** 2)[:-1]:
        dense = [*dense, *group["layers"]]
        error_left -= group["prediction_error"] ** 2 / error
        saving_left -= group["saved"] / saved
        yield dense, max(error_left, 0.0), saving_left


def check(
    prompts: Sequence[str], methods: Sequence[Method | ComposedMethod], caches: Sequence[StepCache] = ()
) -> None:
    """Check the arguments of `tune` that need no model; raises the same errors."""
    if isinstance(prompts, str) or len(prompts) < 2:
        raise ValueError("tune needs two prompts or more: some to calibrate, others to check the result")
    if not methods and not caches:
        raise ValueError("name the methods to try, or leave methods out")
    if not isinstance(caches, list | tuple) or not all(isinstance(cache, StepCache) for cache in caches):
        raise ValueError(f"caches is a list of step caches to try, not {caches!r}: write [foveate.StepCache(...)]")
    if not isinstance(methods, list | tuple) or isinstance(methods, ComposedMethod):
        raise ValueError(f"methods is a list of methods to try, not {methods!r}: write [foveate.ToMA()]")
    for method in methods:
        if not isinstance(method, Method | ComposedMethod):
            raise ValueError(f"not a method: {method!r}; pass an instance such as foveate.ToMA()")
        if any(p.dense_layers or not p.always for p in method.parts):
            raise ValueError(
                "tune chooses dense_layers, start_percent, end_percent and schedules: leave them out of "
                f"{method.title}"
            )


class _Search:
    """State of one search; see the module docstring.

    Args:
        measured: The `Measurements`. Their module is not imported here, so that foveate imports without diffusers.
        budget: The budget.
        calibration: Number of calibration requests, the first ones.
        say: Called with a line about every result.
    """

    def __init__(self, measured: Any, budget: Budget, calibration: int, say: Callable[[str], None]) -> None:
        self.measured, self.budget, self.say = measured, budget, say
        self.steps, self.skipped = measured.requests[0].steps, 1.0
        numbers = range(len(measured.requests))
        self.calibration, self.held_out = list(numbers[:calibration]), list(numbers[calibration:])

    def run(self, methods: Sequence[Method | ComposedMethod], caches: Sequence[StepCache]) -> Preset:
        """The preset; raises the errors of `tune`."""
        costs: dict[Any, dict[str, Any]] = {}
        for method in dict.fromkeys(methods):
            costs[method] = self.measured.cost(method)
            self.say(f"{method.title}: {_describe_cost(costs[method])}")
        useful = [method for method, cost in costs.items() if cost.get("ratio", 1.0) * LEAST_GAIN <= 1]
        skipping = self.caches(caches)
        if not useful and not skipping:
            told = "; ".join(f"{method.title}: {_describe_cost(cost)}" for method, cost in costs.items())
            raise ValueError(f"no method saves time here: {told}")
        layers, parts, weights, nearest = self.measured.layers(useful), list[Any](), np.zeros(self.steps), None
        if useful:
            nearest = min(useful, key=lambda method: mean(costs[method]["errors"]))
            parts = self.measured.slices(nearest)
            weights = _weights(parts, _by_step(costs[nearest], self.steps))
        self.skipped = self.measured.skipped_step()["ratio"] if skipping else 1.0
        front = settings(useful, costs, layers, weights, skipping, self.skipped)
        if not front:
            raise ValueError("no setting saves time here: leave the model dense")
        found = bisect_left(front, True, key=lambda setting: self.holds(setting, self.calibration))
        chosen = next(
            (setting for setting in front[found:] if self.holds(setting, self.held_out) and self.gains(setting)), None
        )
        if chosen is None:
            raise ValueError(self.gap(front[-1]))
        return self.preset(
            chosen,
            {
                "candidates": [
                    {"method": method.title, **cost, "layers": layers.get(method, [])}
                    for method, cost in costs.items()
                ],
                "step_caches": [{"cache": cache.title, **one} for cache, one in skipping.items()],
                "parts_of_the_run": {"method": nearest and nearest.title, "parts": parts},
            },
        )

    def caches(self, caches: Sequence[StepCache]) -> dict[StepCache, dict[str, Any]]:
        """What each step cache skips and costs, without those that skip nothing."""
        found: dict[StepCache, dict[str, Any]] = {}
        for cache in dict.fromkeys(caches):
            one = self.measured.cache(cache)
            if "why" in one:
                self.say(one["why"])
                return {}
            computed = mean(one["computed"])
            self.say(f"{cache.title}: {computed:.0%} of the steps computed, error {one['picture_error']:.2%}")
            if computed < 1:
                found[cache] = one
        return found

    def scores(self, setting: Setting, numbers: list[int]) -> Iterator[float]:
        """Scores of a setting's images."""
        name = f"{1 / setting.time:.2f}x, {'held out' if numbers is self.held_out else 'calibration'}"
        return self.measured.scores(name, [(number, self.variant(setting)) for number in numbers], self.budget.of)

    def variant(self, setting: Setting) -> Any:
        """What generates with a setting."""
        return self.measured.variant(setting.method, setting.cache)

    def holds(self, setting: Setting, numbers: list[int]) -> bool:
        """Whether all these images are within the budget. The first failure is tried first with the next setting."""
        scores: list[float] = []
        for number, score in zip(numbers, self.scores(setting, numbers), strict=True):
            scores.append(score)
            if not score >= self.budget.at_least:  # also NaN
                numbers.remove(number)
                numbers.insert(0, number)
                prompt = self.measured.requests[number].prompt
                self.say(f"{setting.title}: {self.budget.name} {score:.5g} in {prompt!r}, not near enough")
                return False
        kind = "held-out" if numbers is self.held_out else "calibration"
        worst = f"{self.budget.name} {min(scores):.5g} in the worst {kind} image of {len(scores)}"
        self.say(f"{setting.title}: {worst}")
        return True

    def speed_up(self, setting: Setting) -> float:
        """Speed-up of all steps with the setting, from measured step times and the steps that held-out images skip."""
        in_steps = [setting.in_step(i / self.steps) for i in range(self.steps)]
        ratios = np.array([self.measured.cost(method)["ratio"] if method else 1.0 for method in in_steps])
        return 1 / _time(self.computed(setting), self.skipped, ratios)

    def computed(self, setting: Setting) -> Any:
        """For each step, the fraction of its forward passes that held-out images compute [steps]."""
        return np.mean([self.measured.computed(number, self.variant(setting)) for number in self.held_out], 0)

    def gains(self, setting: Setting) -> bool:
        """Whether the measured speed-up is large enough."""
        if (speed_up := self.speed_up(setting)) < LEAST_GAIN:
            self.say(f"{setting.title}: only {speed_up:.2f}x when measured, not worth it")
        return speed_up >= LEAST_GAIN

    def gap(self, setting: Setting) -> str:
        """Error message with the distance of the nearest setting from the budget."""
        worst, asked = min(self.scores(setting, self.calibration + self.held_out)), self.budget.at_least
        if worst >= asked:
            return f"no setting within the budget saves time: {setting.title} has {self.speed_up(setting):.2f}x"
        return (
            f"no setting that saves time reaches {self.budget.name} {asked:g} in every image: the nearest, "
            f"{setting.title}, has {worst:.5g} in the worst one, {asked - worst:.2g} too little"
        )

    def preset(self, setting: Setting, evidence: dict[str, Any]) -> Preset:
        """The preset of a setting."""
        from foveate.utils.device import dtype_name, versions

        requests, variant, active = self.measured.requests, self.variant(setting), setting.active(self.steps)
        cost = self.measured.cost(setting.method) if setting.method else self.measured.skipped_step()
        numbers = sorted(self.held_out)
        held_out = [
            {
                "prompt": requests[number].prompt,
                "seed": requests[number].seed,
                "score": _finite(score),
                "dense_s": self.measured.seconds(number, None),
                "picture_s": self.measured.seconds(number, variant),
            }
            for number, score in zip(numbers, self.scores(setting, numbers), strict=True)
        ]
        first = requests[0]
        return Preset(
            methods=setting.method.parts if setting.method else (),
            cache=setting.cache,
            models=[describe(model) for model in self.measured.denoisers],
            size=first.size,
            grids=tuple(tuple(map(tuple, grids)) for grids in cost.get("grids", ())),
            evidence={
                "budget": {"score": self.budget.name, "at_least": _finite(self.budget.at_least)},
                "speed_up": self.speed_up(setting),
                "step_s": {"dense": cost["dense_s"], "at work": cost.get("step_s")},
                "active_steps": float(active.mean()),
                "computed_steps": float(self.computed(setting).mean()),
                "steps": first.steps,
                "guidance": first.guidance,
                "frames": first.frames,
                "dtype": dtype_name(self.measured.pipeline.dtype),
                "device": str(self.measured.pipeline._execution_device),
                "versions": versions(),
                "held_out": held_out,
                **evidence,
            },
        )


def _describe_cost(cost: dict[str, Any]) -> str:
    """Text for the cost of a method."""
    if "why" in cost:
        return cost["why"]
    low, high = (1 / ratio for ratio in reversed(cost.get("ratios", [cost["ratio"]] * 2)))
    spread = f" ({low:.2f} to {high:.2f})" if f"{low:.2f}" != f"{high:.2f}" else ""
    return f"{1 / cost['ratio']:.2f}x a step{spread}, error of the prediction {mean(cost['errors']):.1%}"


def _finite(number: float) -> float | None:
    """The number, None if it is infinite: JSON has no infinity."""
    return number if isfinite(number) else None
