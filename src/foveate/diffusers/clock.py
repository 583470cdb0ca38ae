"""Position in a denoising run."""

import math
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Clock", "Step"]


class Step(NamedTuple):
    """Position of a forward pass in a denoising run.

    Attributes:
        number: Number of the step. All calls of the model in one step have the same number.
        key: Run, batch size, dtype and device: a plan of token merging is valid as long as they stay the same.
    """

    number: int
    key: Hashable


class Clock:
    """Progress of a pipeline's denoising run, read from its scheduler.

    Args:
        pipeline: The pipeline, or None if the model is used alone.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._timesteps: Any = None  # those of the current run
        self._timestep = math.inf  # only without a scheduler
        self._run = self._step = 0

    @property
    def pipeline(self) -> Any:
        """The pipeline; None if there is none, or no longer."""
        return self._pipeline() if self._pipeline else None

    def __call__(self) -> float | None:
        """Fraction of the steps that are done; None without a scheduler that counts steps."""
        scheduler = self._scheduler()
        return scheduler and _index(scheduler) / len(scheduler.timesteps)

    def step(self, timestep: Tensor) -> tuple[int, int]:
        """Number of the run and number of the step in it.

        Without a scheduler, a smaller timestep begins a new step and a larger one a new run.

        Args:
            timestep: Argument of the denoiser. Reading it waits for the device.
        """
        if torch.is_grad_enabled():  # training: every forward pass has other pictures
            self._run += 1
            return self._run, 0
        timesteps = getattr(self._any_scheduler(), "timesteps", None)
        if timesteps is not self._timesteps:
            self._run, self._step, self._timesteps, self._timestep = self._run + 1, 0, timesteps, math.inf
        if scheduler := self._scheduler():
            return self._run, _index(scheduler)
        now = timestep.flatten()[0].item()
        if now > self._timestep:
            self._run, self._step = self._run + 1, 0
        elif now < self._timestep < math.inf:
            self._step += 1
        self._timestep = now
        return self._run, self._step

    def _scheduler(self) -> Any:
        """The pipeline's scheduler, if it counts steps."""
        scheduler = self._any_scheduler()
        return scheduler if hasattr(scheduler, "step_index") and len(scheduler.timesteps) else None

    def _any_scheduler(self) -> Any:
        """The pipeline's scheduler, if there is one."""
        return getattr(self.pipeline, "scheduler", None)

    def __reduce__(self) -> tuple[type["Clock"], tuple[None]]:
        return Clock, (None,)  # a copied or saved model has no pipeline


def _index(scheduler: Any) -> int:
    """Index of the current step of a scheduler, which is None there before the first step."""
    return scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
