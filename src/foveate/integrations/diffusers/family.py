"""What every model family offers to `apply`."""

from abc import ABC, abstractmethod
from collections import Counter
from types import MethodType
from typing import Any

import torch

from foveate.integrations.diffusers.summary import LayerReport
from foveate.methods import Method

__all__ = ["Family"]


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
        """

    @abstractmethod
    def remove(self) -> None:
        """Give the model back, bit for bit. Doing it twice is fine."""

    @abstractmethod
    def report(self) -> list[LayerReport]:
        """What each attention layer did, in running order: in the last sparse forward, or in the last if none was."""

    outcomes: Counter[str]
    """How many forwards there were since `apply`, by the reason why they were dense; "" counts the sparse ones."""

    paused: bool = False
    """While it is true, every forward is dense: see `Handle.paused`."""

    @property
    @abstractmethod
    def plan(self) -> Any | None:
        """What the method decided for the last forward; None if it was dense."""

    @staticmethod
    def of(model: torch.nn.Module) -> "Family | None":
        """The family at work in a model, found by its hooks: a deep copy of a model carries one of its own."""
        owners = (hook.__self__ for hook in model._forward_pre_hooks.values() if isinstance(hook, MethodType))
        return next((owner for owner in owners if isinstance(owner, Family)), None)
