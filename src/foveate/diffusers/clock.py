"""Position of forward passes in denoising runs, told by the timesteps that the model is given."""

import math
import sys
import threading
import weakref
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Caller", "Clock", "Step"]

PASSES = 16  # passes of one step that keep plans: windows of a panorama may be more, and plans take memory


class Step(NamedTuple):
    """Position of a forward pass in a denoising run.

    Attributes:
        number: Number of the step. All passes of one step have the same.
        progress: Fraction of the run that is done.
        kept: What methods keep from step to step, by owner. Passes of one step, as of guidance in two passes or
            windows of a panorama, have one each: the first shares that of the first pass of other steps.
    """

    number: int
    progress: float
    kept: dict[Hashable, Any]


class Run:
    """A denoising run: the number and timestep of its last step, and what its passes keep."""

    def __init__(self) -> None:
        self.number, self.level = 0, math.inf
        self._passes = 0  # of the current step
        self._kept: list[dict[Hashable, Any]] = []

    def at(self, number: int, progress: float) -> Step:
        """Position of the next pass, in the step with this number."""
        self._passes = self._passes + 1 if number == self.number else 1
        self.number = number
        if self._passes > PASSES:
            return Step(number, progress, {})
        self._kept += [{} for _ in range(self._passes - len(self._kept))]
        return Step(number, progress, self._kept[self._passes - 1])


class Caller(threading.local):
    """Who calls the model in this thread.

    Attributes:
        runs: The current run of each scheduler, by its timesteps.
        pipeline: The pipeline that `Handle.image` names; None if there is none.
        loop: The run of a loop without a pipeline, opened by `Handle.image`; None outside of one.
        paused: Whether every forward pass is dense: see `Handle.paused`.
    """

    def __init__(self) -> None:
        self.runs: Any = WeakTensorKeyDictionary()
        self.pipeline: Any = None
        self.loop: Run | None = None
        self.paused = False

    def __reduce__(self) -> tuple[type["Caller"], tuple[()]]:
        return Caller, ()  # a copied or saved model has no callers


class Clock:
    """Step and progress of denoising runs.

    The pipeline that generates in this thread tells the step, whatever pipeline the methods were applied to. In a loop
    without one, the scheduler of the latter does while the timestep that the model is given is the scheduler's own.
    Other passes are those of an unknown caller: their progress follows the timestep, and they keep nothing.

    Args:
        pipeline: The pipeline that methods were applied to; None if they were applied to the model alone.

    Attributes:
        caller: Who calls the model in this thread.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self.caller = Caller()

    @property
    def pipeline(self) -> Any:
        """The pipeline; None if there is none, or no longer."""
        return self._pipeline() if self._pipeline else None

    @contextmanager
    def image(self, pipeline: Any) -> Generator[None]:
        """Context in which the passes of this thread belong to one run: see `Handle.image`."""
        caller = self.caller
        before, caller.pipeline, caller.loop = (caller.pipeline, caller.loop), pipeline, Run()
        try:
            yield
        finally:
            caller.pipeline, caller.loop = before

    def step(self, timestep: Tensor, scale: float | None, *, keep: bool) -> Step:
        """Position of the forward pass that begins.

        Reading the timestep waits for its device. It is not read where the scheduler of a pipeline counts its steps.

        Args:
            timestep: Timestep that the model is given; the largest counts where tokens differ.
            scale: Timestep of pure noise; None if timesteps have another scale.
            keep: Whether the pass shares what others of its run keep.
        """
        caller = self.caller
        generating = caller.pipeline or _generating_pipeline()
        scheduler = getattr(generating or self.pipeline, "scheduler", None)
        counted = getattr(scheduler, "step_index", None), getattr(scheduler, "begin_index", None)
        known = generating is not None and counted != (None, None)
        capturing = timestep.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph can read nothing
        level = math.nan if scale is None or known or capturing else float(timestep.max()) / scale
        precision = torch.finfo(timestep.dtype).eps if timestep.is_floating_point() else 0.0
        far = level * precision + 1e-6  # two roundings of the timestep
        number, progress, timesteps = None, round(1 - level, 4), getattr(scheduler, "timesteps", None)
        if timesteps is not None and (number := _number(scheduler, level, far)) is not None:
            progress = number / len(timesteps)
        if not keep:
            return Step(0, progress, {})
        if number is not None:
            run = caller.runs.get(timesteps)
            if run is None or number < run.number:
                run = caller.runs[timesteps] = Run()
            return run.at(number, progress)
        if timesteps is not None:
            caller.runs.pop(timesteps, None)  # its next image may not be the one that plans were kept for
        if (run := caller.loop) is None:
            return Step(0, progress, {})
        if level > run.level + far:  # a smaller timestep begins a new step, a larger one a new run
            run = caller.loop = Run()
        number, run.level = run.number + (level < run.level - far < math.inf), level
        return run.at(number, progress)

    def __reduce__(self) -> tuple[type["Clock"], tuple[None]]:
        return Clock, (None,)  # a copied or saved model has no pipeline


def _generating_pipeline() -> Any:
    """The pipeline whose call this thread is in, or that of a block; it may share its models with others."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_name == "__call__":
            for caller in map(frame.f_locals.get, ("self", "components")):
                if isinstance(caller, DiffusionPipeline | ModularPipeline):
                    return caller
    return None


def _number(scheduler: Any, level: float, far: float) -> int | None:
    """Number of the scheduler's step, if the model is given its timestep.

    Args:
        scheduler: A scheduler of diffusers.
        level: Timestep of the model, 1 at pure noise; NaN if it was not read.
        far: Largest difference from the scheduler's timestep.
    """
    levels = _levels(scheduler)
    if hasattr(scheduler, "step_index"):  # None before the first step
        number = scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
        return number if number < len(levels) and (math.isnan(level) or abs(levels[number] - level) <= far) else None
    return next((i for i, left in enumerate(levels.tolist()) if abs(left - level) <= far), None)


def _levels(scheduler: Any) -> Tensor:
    """Timestep of each step, 1 at pure noise; that of MiniMax-H3 rises from 0 to 1, and its sigmas fall."""
    noise = getattr(scheduler, "config", {}).get("num_train_timesteps")
    if noise is None and hasattr(scheduler, "sigmas"):
        return scheduler.sigmas[:-1]
    return scheduler.timesteps / (noise or 1000)
