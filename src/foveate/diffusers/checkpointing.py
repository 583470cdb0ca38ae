# pyright: basic
"""Gradient checkpointing runs blocks again in the backward pass: with the plans that they had."""

from collections.abc import Callable
from typing import Any

from torch import nn

from foveate.diffusers.backend import dispatches, set_attention

__all__ = ["RerunWithPlans"]


class RerunWithPlans:
    """A checkpointing function that runs a block again with the plans it had, whatever forward passes came between.

    Args:
        original: The model's own checkpointing function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    @classmethod
    def install(cls, holder: Any) -> None:
        """Replace the checkpointing function of a module, once."""
        if not isinstance(holder._gradient_checkpointing_func, cls):
            holder._gradient_checkpointing_func = cls(holder._gradient_checkpointing_func)

    @classmethod
    def remove(cls, holder: Any) -> None:
        """Give a module its own checkpointing function back."""
        if isinstance(rerun := getattr(holder, "_gradient_checkpointing_func", None), cls):
            holder._gradient_checkpointing_func = rerun.original

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Run the block; the backward pass will run it again."""
        owned: list[Any] = [getattr(module, "processor", None) for module in block.modules()]
        processors = [processor for processor in owned if dispatches(processor)]
        plans = [(processor, processor._attention_backend, processor._parallel_config) for processor in processors]

        def run(*args: Any) -> Any:
            now = [(processor, processor._attention_backend, processor._parallel_config) for processor in processors]
            for plan in plans:
                set_attention(*plan)
            try:
                return block(*args)
            finally:
                for plan in now:
                    set_attention(*plan)

        return self.original(run, *args)
