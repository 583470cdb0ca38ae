"""How far a denoising run is."""

import weakref
from typing import Any

__all__ = ["Clock"]


class Clock:
    """How far a pipeline's denoising run is, without counting calls."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)

    def __call__(self) -> float | None:
        """Fraction of the steps that are done; None where no scheduler tells."""
        pipeline = self._pipeline() if self._pipeline else None
        scheduler: Any = getattr(pipeline, "scheduler", None)
        if not hasattr(scheduler, "step_index") or not len(scheduler.timesteps):
            return None
        step = scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
        return step / len(scheduler.timesteps)

    def __reduce__(self) -> tuple[type["Clock"], tuple[None]]:
        return Clock, (None,)  # a copied or saved model has no pipeline
