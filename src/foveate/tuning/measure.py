# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Error and time of methods and step caches on a model, by step and by layer.

All measurements are kept in a folder: an interrupted run resumes from there.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from zlib import crc32

import torch
from PIL import Image
from torch import Tensor, nn

from foveate.diffusers.adapter import ModelAdapter
from foveate.diffusers.apply import Handle, apply, denoisers
from foveate.diffusers.card import card_of
from foveate.diffusers.preset import Preset, StepCache, describe
from foveate.methods.base import layer_ranges
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import MethodLike, throughout
from foveate.pipelines.request import Request, draw, fingerprint
from foveate.pipelines.steps import Call, counting, recording
from foveate.tuning.similarity import psnr
from foveate.utils.device import dtype_name
from foveate.utils.files import claim, slug, write_whole
from foveate.utils.progress import Track
from foveate.utils.timing import now

__all__ = ["Measurements"]

RECORDED = 2  # prompts whose dense steps are recorded
STEPS = 6  # recorded steps, shared among these prompts
GROUPS = 8  # groups of adjacent layers
SLICES = 5  # parts of the run
ROUNDS = 5  # most measurements of the recorded steps
NOISE = 1.1  # factor within which the ratios of two halves of the measurements agree


class Recorded(NamedTuple):
    """The calls of the denoisers in one step of a dense run.

    Attributes:
        step: Number of the step.
        calls: Each denoiser with its arguments.
        predictions: Outputs of the denoisers.
    """

    step: int
    calls: list[tuple[nn.Module, Call]]
    predictions: list[Tensor]


class Measurements:
    """Measurements on one pipeline, for requests that differ in prompt and seed only.

    Args:
        pipeline: The pipeline.
        requests: Requests for images or videos.
        calibration: Number of requests for calibration, the first ones; the others are held out.
        folder: Folder for images and measurements.
        track: Shows progress.

    Raises:
        ValueError: If the model has no card, or the folder holds measurements of other settings.
    """

    def __init__(
        self, pipeline: Any, requests: Sequence[Request], calibration: int, folder: Path, track: Track
    ) -> None:
        self.pipeline, self.requests, self.folder, self.track = pipeline, requests, folder, track
        self._prompts, first = min(RECORDED, calibration), requests[0]
        self._device = pipeline._execution_device  # with offloading pipeline.device is the CPU
        self.denoisers = [*denoisers(pipeline).values()]
        self._blocks = sum(len(stack.blocks) for stack in card_of(self.denoisers[0]).stacks(self.denoisers[0]))
        settings = {
            "model": type(self.denoisers[0]).__name__,
            "weights": fingerprint(self.denoisers[0]),
            "adapters": getattr(pipeline, "get_list_adapters", dict)(),
            "size": f"{first.size[1]}x{first.size[0]}",
            "steps": first.steps,
            "guidance": first.guidance,
            "frames": first.frames,
            "seed": first.seed,
            "prompts": f"{crc32(json.dumps([request.prompt for request in requests]).encode()):08x}",
            "device": self._device.type,
            "dtype": dtype_name(pipeline.dtype),
        }
        claim(folder, {name: str(value) for name, value in settings.items()})
        self._file = folder / "measured.json"
        self._known: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    # --- images ---

    def scores(
        self,
        name: str,
        pictures: Sequence[tuple[int, MethodLike]],
        measure: Callable[[Image.Image, Image.Image], float],
    ) -> Iterator[float]:
        """Yield the score of each image against the dense one; missing images are generated.

        Args:
            name: Name of the progress bar.
            pictures: Index of the request and method of each image.
            measure: Score of (image, dense image); the frames of a video are stacked vertically.
        """
        needed = {self._path(number, one) for number, method in pictures for one in (None, method)}
        missing = [path for path in needed if not path.exists()]
        advance = self.track(name, len(missing) * self.requests[0].steps) if missing else lambda: None
        for number, method in pictures:
            for one in (None, method):
                if not self._path(number, one).exists():
                    self._draw(number, one, advance)
            with Image.open(self._path(number, method)) as ours, Image.open(self._path(number, None)) as dense:
                score = measure(ours.convert("RGB"), dense.convert("RGB"))
            yield score

    def variant(self, method: MethodLike | None, cache: StepCache | None) -> MethodLike | None:
        """What generates with this method and step cache, either of which may be missing."""
        if cache is None:
            return method
        models = [describe(model) for model in self.denoisers]
        return Preset(methods=method.parts if method else (), cache=cache, models=models, size=self.requests[0].size)

    def seconds(self, number: int, method: MethodLike | None) -> float:
        """Seconds of generating an image."""
        return float(self._told(number, method)["seconds"])

    def computed(self, number: int, method: MethodLike | None) -> list[float]:
        """For each step of an image, the fraction of its forward passes that were computed, not skipped."""
        told = self._told(number, method).get("computed")  # folders of foveate before step caches do not say
        return json.loads(told) if told else [1.0] * self.requests[0].steps

    def _told(self, number: int, method: MethodLike | None) -> dict[str, str]:
        """What the file of an image tells about it."""
        with Image.open(self._path(number, method)) as picture:
            return {str(name): str(text) for name, text in picture.info.items()}

    def _path(self, number: int, method: MethodLike | None) -> Path:
        name = f"{slug(method.title)}-{crc32(repr(method).encode()):08x}" if method else "dense"
        return self.folder / name / f"{number:03}.png"

    def _draw(self, number: int, method: MethodLike | None, on_step: Callable[[], None]) -> None:
        request, computed, before = self.requests[number], list[float](), (0, 0)

        def after_step() -> None:
            nonlocal before
            counted = self._passes()
            passes, skipped = counted[0] - before[0], counted[1] - before[1]
            computed.append(1 - skipped / passes if passes else 1.0)
            before = counted
            on_step()

        with apply(self.pipeline, method) if method else nullcontext():
            began = now(self._device)
            frames = draw(self.pipeline, request, after_step)
            seconds = now(self._device) - began
        about = {"prompt": request.prompt, "method": repr(method) if method else "dense"}
        about |= {"seconds": f"{seconds:.4f}", "computed": json.dumps(computed)}
        write_picture(self._path(number, method), _stacked(frames), about)

    def _passes(self) -> tuple[int, int]:
        """Number of forward passes since `apply`, and of those that a step cache skipped; 0 without methods."""
        adapters = [*filter(None, map(ModelAdapter.of, self.denoisers))]
        skipped = sum(adapter.skipped for adapter in adapters)
        return skipped + sum(adapter.outcomes.total() for adapter in adapters), skipped

    # --- the denoiser ---

    @cached_property
    def recorded(self) -> list[Recorded]:
        """Recorded dense steps, spread over the prompts; generates their images again."""
        steps = self.requests[0].steps
        wanted = sorted({round(i * (steps - 1) / (STEPS - 1)) for i in range(STEPS)})
        advance = self.track("dense, recorded", self._prompts * steps)
        found = [
            one
            for number in range(self._prompts)
            for one in self._record(number, wanted[number :: self._prompts], advance)
        ]
        return sorted(found, key=lambda one: one.step)

    def _record(self, number: int, steps: Sequence[int], advance: Callable[[], None]) -> list[Recorded]:
        """Record these steps of a dense run."""
        found: dict[int, list[tuple[nn.Module, Call]]] = {step: [] for step in steps}
        step = 0

        def keep(model: nn.Module, call: Call) -> None:
            if step in found:
                found[step].append((model, call))

        def after_step() -> None:
            nonlocal step
            step += 1
            advance()

        with recording(self.denoisers, keep):
            self._draw(number, None, after_step)
        return [Recorded(step, calls, self._forward(calls)[1]) for step, calls in found.items() if calls]

    @torch.no_grad()
    def cost(self, method: MethodLike) -> dict[str, Any]:
        """Error and time of a step with a method that is active in all steps.

        Dense and the method take turns on the recorded inputs. The second of two steps makes no new plan of token
        merging; the time of a plan is divided among the steps that share it.

        Returns:
            "steps" and "errors" (relative, of the prediction), "dense_s" and "step_s" (seconds of the fastest call),
            "ratio" (step_s / dense_s), "ratios" (of two halves of the measurements), "grids" (of image tokens); or
            "why" alone, if the method stays dense, does not fit the model, or the machine is too busy to tell, which
            is measured again the next time.
        """
        return self._once(f"cost {method!r}", lambda: self._cost(method))

    def _cost(self, method: MethodLike) -> dict[str, Any]:
        errors: list[float] = []
        seconds: list[tuple[float, float, float]] = []
        grids: list[Any] = []
        shared = max(getattr(part, "weights_every", 0) for part in method.parts)
        ratios = [0.0, 0.0]
        for _ in range(ROUNDS):
            errors.clear()
            advance = self.track(f"steps: {method.title}", len(self.recorded))
            for recorded in self.recorded:
                dense, _ = self._forward(recorded.calls)
                try:
                    with apply(self.pipeline, throughout(method)) as run:
                        (first, predictions), (again, _) = self._two_steps(run, recorded)
                        layers = run.summary().layers
                        grids = self._grids()
                except ValueError as error:
                    return {"why": str(error)}
                if all(layer.why for layer in layers):
                    return {"why": layers[0].why}
                errors.append(mean(map(_relative, predictions, recorded.predictions)))
                seconds.append((dense, first, again))
                advance()
            halves = [_step_times(half, shared) for half in (seconds[::2], seconds[1::2] or seconds)]
            ratios = sorted(step / dense for dense, step in halves)
            if ratios[1] <= NOISE * ratios[0]:
                break
        else:
            fast, slow = (f"{1 / ratio:.2f}x" for ratio in ratios)
            return {"noisy": True, "why": f"{slow} to {fast} a step: the machine is too busy to tell, run tune again"}
        dense, step = _step_times(seconds, shared)
        return {
            "steps": [recorded.step for recorded in self.recorded],
            "errors": errors,
            "dense_s": dense,
            "step_s": step,
            "ratio": step / dense,
            "ratios": ratios,
            "grids": grids,
        }

    def skipped_step(self) -> dict[str, float]:
        """Time of a step that a step cache skips.

        Returns:
            "dense_s" and "skipped_s" (seconds of the fastest call), "ratio" (skipped_s / dense_s).
        """
        return self._once("a skipped step", self._skipped_step)

    @torch.no_grad()
    def _skipped_step(self) -> dict[str, float]:
        seconds: list[tuple[float, float]] = []
        for recorded in self.recorded:
            dense, _ = self._forward(recorded.calls)
            with apply(self.pipeline, self.variant(None, StepCache(threshold=math.inf))) as run:
                _, (skipped, _) = self._two_steps(run, recorded)
            seconds.append((dense, skipped))
        dense, skipped = (min(times) for times in zip(*seconds, strict=True))
        return {"dense_s": dense, "skipped_s": skipped, "ratio": skipped / dense}

    def cache(self, cache: StepCache) -> dict[str, Any]:
        """What a step cache alone skips and costs, in the image of the first request.

        Returns:
            "computed" (see `computed`) and "picture_error" (root mean square, pixels from 0 to 1); or "why" alone, if
            the model has no such cache.
        """
        return self._once(f"cache {cache!r}", lambda: self._cache(cache))

    def _cache(self, cache: StepCache) -> dict[str, Any]:
        variant = self.variant(None, cache)
        try:
            (score,) = self.scores(cache.title, [(0, variant)], psnr)
        except ValueError as error:
            return {"why": str(error)}
        return {"computed": self.computed(0, variant), "picture_error": 10 ** (-score / 20)}

    @torch.no_grad()
    def layers(self, methods: Sequence[MethodLike]) -> dict[MethodLike, list[dict[str, Any]]]:
        """Error of each method when it is active in one group of layers only.

        Returns:
            For each method and group "layers" (their numbers), "prediction_error" (relative), "saved" (floating-point
            operations).
        """
        groups = _groups(self._blocks)
        todo = [method for method in methods if any(f"layers {g} {method!r}" not in self._known for g in groups)]
        advance = self.track("layers", len(groups) * len(todo)) if todo else lambda: None
        for group in groups:
            for method in todo:
                self._once(f"layers {group} {method!r}", lambda m=method, g=group: self._layers(m, g))
                advance()
        return {method: [self._known[f"layers {group} {method!r}"] for group in groups] for method in methods}

    def _layers(self, method: MethodLike, group: list[int]) -> dict[str, Any]:
        middle = len(self.recorded) // 2
        limited = throughout(method, dense_layers=layer_ranges(set(range(self._blocks)) - set(group)))
        errors: list[float] = []
        saved = 0
        for recorded in self.recorded[max(0, middle - 1) : middle + 1]:
            try:
                with apply(self.pipeline, limited) as run:
                    _, predictions = self._forward(recorded.calls[:1])
                    saved = sum(layer.saved for layer in run.summary().layers if not layer.why)
            except ValueError:  # token merging skips all of these
                return {"layers": group, "prediction_error": 0.0, "saved": 0}
            errors.append(_relative(predictions[0], recorded.predictions[0]))
        return {"layers": group, "prediction_error": mean(errors), "saved": saved}

    def slices(self, method: MethodLike) -> list[dict[str, Any]]:
        """Error of an image when a method is active in one part of the run only.

        Returns:
            For each part "steps" (their numbers) and "picture_error" (root mean square, pixels from 0 to 1).
        """
        steps = self.requests[0].steps
        windows: list[tuple[list[int], MethodLike]] = []
        for part in range(SLICES):
            window = throughout(method, part / SLICES, round((part + 1) / SLICES - 1e-3, 3))
            if numbers := [step for step in range(steps) if window.parts[0].covers(step / steps)]:
                windows.append((numbers, window))
        scores = self.scores("parts of the run", [(0, window) for _, window in windows], psnr)
        return [
            {"steps": numbers, "picture_error": 10 ** (-score / 20)}
            for (numbers, _), score in zip(windows, scores, strict=True)
        ]

    def _grids(self) -> list[Any]:
        """Grids of image tokens in the last forward pass, one entry per part of the model with its own grid."""
        adapters = filter(None, map(ModelAdapter.of, self.denoisers))
        ran = [stack for adapter in adapters for stack in adapter.now.decisions.values() if stack.layouts]
        return [list(map(list, grids)) for grids in dict.fromkeys(stack.layout.grids for stack in ran)]

    def _two_steps(self, run: Handle, recorded: Recorded) -> list[tuple[float, list[Tensor]]]:
        """Run the calls of a step as the first two steps of an image; returns `_forward` of both."""
        with counting(run) as begin_step:
            first = self._forward(recorded.calls)
            begin_step(1)
            return [first, self._forward(recorded.calls)]

    def _forward(self, calls: Sequence[tuple[nn.Module, Call]]) -> tuple[float, list[Tensor]]:
        """Run recorded calls again; returns seconds and predictions."""
        began = now(self._device)
        predictions = [call.run(model) for model, call in calls]
        return now(self._device) - began, predictions

    def _once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Result of a measurement, cached on disk."""
        if name not in self._known:
            measured = measure()
            if isinstance(measured, dict) and measured.get("noisy"):
                return measured
            self._known[name] = measured
            write_whole(self._file, json.dumps(self._known, indent=1).encode())
        return self._known[name]


def _step_times(seconds: Sequence[tuple[float, float, float]], shared: int) -> tuple[float, float]:
    """Seconds of a dense step and of one with a method, from those of dense, first and second steps.

    Every call does the same work: the fastest one was disturbed the least. `shared` steps have a plan in common.
    """
    dense, first, again = (min(times) for times in zip(*seconds, strict=True))
    return dense, again + max(0.0, first - again) / shared if shared else again


def _groups(layers: int) -> list[list[int]]:
    """Layer indices in at most `GROUPS` contiguous groups of about equal size."""
    count = min(GROUPS, layers)
    cuts = [round(i * layers / count) for i in range(count + 1)]
    return [list(range(a, b)) for a, b in pairwise(cuts)]


def _relative(ours: Tensor, dense: Tensor) -> float:
    """Relative difference between tensors."""
    return ((ours - dense).float().norm() / dense.float().norm()).item()


def _stacked(frames: Sequence[Image.Image]) -> Image.Image:
    """The frames, stacked vertically."""
    if len(frames) == 1:
        return frames[0]
    whole = Image.new("RGB", (frames[0].width, sum(frame.height for frame in frames)))
    for number, frame in enumerate(frames):
        whole.paste(frame, (0, number * frame.height))
    return whole
