"""How far a denoising run is."""

import math
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Clock", "Step"]


class Step(NamedTuple):
    """Where in a run a forward stands.

    Attributes:
        number: Of the step; the calls of one step have one number.
        key: What a plan depends on but for the features: batch, dtype, device.
    """

    number: int
    key: Hashable


class Clock:
    """How far a pipeline's denoising run is, without counting calls."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._timesteps: Any = None  # of the run that is going on
        self._timestep = math.inf  # where no scheduler tells
        self._run = self._step = 0

    def __call__(self) -> float | None:
        """Fraction of the steps that are done; None where no scheduler tells."""
        scheduler = self._scheduler()
        return scheduler and _index(scheduler) / len(scheduler.timesteps)

    def step(self, timestep: Tensor) -> tuple[int, int]:
        """(run, number of the step in it); the calls of one step have one number.

        Where no scheduler tells, a step is a timestep that differs from the last one, and a run begins where it rises.

        Args:
            timestep: What the denoiser is given. Reading it means waiting for the device.
        """
        if torch.is_grad_enabled():  # training: every forward is of other pictures
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
        """The pipeline's, if it tells the step."""
        scheduler = self._any_scheduler()
        return scheduler if hasattr(scheduler, "step_index") and len(scheduler.timesteps) else None

    def _any_scheduler(self) -> Any:
        """The pipeline's, whether or not it tells the step."""
        return getattr(self._pipeline() if self._pipeline else None, "scheduler", None)

    def __reduce__(self) -> tuple[type["Clock"], tuple[None]]:
        return Clock, (None,)  # a copied or saved model has no pipeline


def _index(scheduler: Any) -> int:
    """Of the step that a scheduler is at; before the first one it is None."""
    return scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
