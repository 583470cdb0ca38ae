"""What every model family offers to `apply`, and what all of them do alike."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch

from foveate.diffusers.clock import Clock, Step
from foveate.diffusers.summary import LayerReport
from foveate.methods import Method
from foveate.methods.base import DenseFallback, TokenMerging

__all__ = ["Family"]

log = logging.getLogger("foveate")

T = TypeVar("T")


def _remembers(model: torch.nn.Module) -> bool:
    """Whether one of diffusers' caches (First Block Cache, TaylorSeer, ...) is in the model."""
    registries = (vars(module).get("_diffusers_hook") for module in model.modules())
    return any(hook._is_stateful for registry in registries if registry for hook in registry.hooks.values())


class Family(ABC):
    """One model with methods in it, from construction to `remove`.

    A family borrows: hooks on the root are bound methods of the family (that is how `of` finds it), registered with
    torch's own `register_forward_*hook`; processors are set module by module and keep the one they replace.
    """

    model: torch.nn.Module

    @abstractmethod
    def __init__(self, model: torch.nn.Module, methods: tuple[Method, ...], pipeline: Any) -> None:
        """Check that the methods fit the model, then put them in; on an error the model is as it was.

        Args:
            model: The denoiser.
            methods: What the user applies.
            pipeline: The pipeline around the model, or None.

        Raises:
            ValueError: If a method works in a part of the run only, and there is no pipeline to tell which.
        """
        if pipeline is None and not all(method.always for method in methods):
            raise ValueError(
                "start_percent and end_percent need a scheduler to tell the step: apply to the pipeline, not the model"
            )
        self.model, self.methods, self.clock = model, methods, Clock(pipeline)
        self.outcomes = Counter[str]()

    @abstractmethod
    def remove(self) -> None:
        """Give the model back, bit for bit. Doing it twice is fine."""

    @abstractmethod
    def report(self) -> list[LayerReport]:
        """What each attention layer did, in running order: in the last sparse forward, or in the last if none was."""

    outcomes: Counter[str]
    """How many forwards there were since `apply`, by the reason why they were dense; "" counts the sparse ones."""

    hooks_inside: bool = False
    """Whether there are hooks on modules inside the model, which may have been compiled, not on its root alone."""

    paused: bool = False
    """While it is true, every forward is dense: see `Handle.paused`."""

    @property
    @abstractmethod
    def plan(self) -> Any | None:
        """What the method decided for the last forward; None if it was dense."""

    def check_layers(self, layers: int) -> None:
        """Refuse `dense_layers` that the model does not have."""
        for method in self.methods:
            if beyond := sorted(method.dense_layer_set() - set(range(layers))):
                raise ValueError(f"dense_layers names layer {beyond[0]}, but the model has layers 0 to {layers - 1}")

    def check_step(self, method: Method, tokens: int) -> None:
        """Raise why a method stays dense in this forward, whatever the model is."""
        if self.paused:
            raise DenseFallback("paused")
        if (isinstance(method, TokenMerging) or not method.always) and _remembers(self.model):
            raise DenseFallback("a cache keeps tokens from step to step, which must not change their order or number")
        if not method.always:
            if (progress := self.clock()) is None:
                raise DenseFallback("no scheduler tells the step, and start_percent to end_percent is part of the run")
            if not method.covers(progress):
                raise DenseFallback("this step lies outside start_percent to end_percent")
        if tokens < method.min_tokens:
            raise DenseFallback(f"{tokens} image tokens are fewer than min_tokens={method.min_tokens}")

    def merging_step(self, method: TokenMerging, timestep: Any, x: torch.Tensor) -> Step:
        """Where in the run the forward of these samples stands.

        Raises:
            DenseFallback: If nothing merges in this step.
        """
        run, number = self.clock.step(torch.as_tensor(timestep))
        if number % method.merge_every:
            raise DenseFallback(f"this is no step that merges: merge_every={method.merge_every}")
        return Step(number, (run, x.shape[0], x.dtype, x.device))

    def ask(self, method: Method | None, decide: Callable[[], T]) -> tuple[T | None, str]:
        """What a method decided for this forward, or None and why it stays dense."""
        if method is None:
            return None, ""
        try:
            return decide(), ""
        except DenseFallback as reason:
            if not self.paused and str(reason) not in self.outcomes:
                log.warning("%s stays dense: %s", type(method).__name__, reason)
            return None, str(reason)

    @staticmethod
    def of(model: torch.nn.Module) -> "Family | None":
        """The family at work in a model, found by its hooks: a deep copy of a model carries one of its own."""
        owners = (hook.__self__ for hook in model._forward_pre_hooks.values() if isinstance(hook, MethodType))
        return next((owner for owner in owners if isinstance(owner, Family)), None)
