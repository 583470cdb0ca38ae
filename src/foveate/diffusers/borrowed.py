# pyright: basic
"""Attention processors in the place of others, and what they are told with every forward."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from foveate.diffusers.order import Reorder
from foveate.methods.base import DenseFallback
from foveate.ops.joint_attention import Pattern

__all__ = [
    "Borrowed",
    "KeepTables",
    "check_processor",
    "check_strangers",
    "give_back",
    "of_original",
    "outside_compiled_code",
    "replaced",
    "strangers",
]

outside_compiled_code = torch.compiler.disable(
    reason="foveate reads the image grid outside compiled code; should that break a graph that must be whole, "
    "compile the blocks instead: model.compile_repeated_blocks(fullgraph=True)"
)


def of_original(name: str) -> property:
    """An attribute that is read and set on the borrowed processor."""
    return property(lambda self: getattr(self.original, name), lambda self, value: setattr(self.original, name, value))


class Borrowed:
    """A processor in the place of another; what diffusers sets on it reaches the other too.

    Attributes:
        original: The processor to give back.
        table: Who attends to whom in the current forward; None is everyone to everyone.
    """

    original: Any
    table: Pattern | None

    _attention_backend = of_original("_attention_backend")
    _parallel_config = of_original("_parallel_config")


def check_processor(name: str, attn: nn.Module, number: int, known: Collection[type]) -> None:
    """Refuse to replace a processor of another type than these.

    Args:
        name: Of the layer.
        attn: The layer.
        number: By which `dense_layers` names it.
        known: The types.
    """
    if type(attn.processor) not in known:
        raise ValueError(
            f"{name} has a {type(attn.processor).__name__}, which foveate does not know: "
            f"restore the model's own processors first, or leave it dense with dense_layers={str(number)!r}"
        )


def replaced(attn: nn.Module) -> str:
    """Why a layer whose processor is no longer ours is dense."""
    return f"a {type(attn.processor).__name__} was set after apply: remove and apply again"


def strangers(layers: Iterable[Any]) -> dict[str, nn.Module]:
    """Layers, by name, whose processor someone has replaced since `apply`."""
    return {
        layer.name: layer.attn for layer in layers if layer.processor and layer.attn.processor is not layer.processor
    }


def check_strangers(layers: Iterable[Any], known: Collection[type]) -> None:
    """Stay dense where a new processor may care for the order of the tokens or their number, as one that keeps maps.

    Raises:
        DenseFallback: If there is one of another type than these.
    """
    for attn in strangers(layers).values():
        if type(attn.processor) not in known and not isinstance(attn.processor, Borrowed):
            raise DenseFallback(replaced(attn))


def give_back(model: Any, attns: Iterable[Any]) -> None:
    """Put the original processors back, and gradient checkpointing; a processor that someone else has set stays."""
    if isinstance(again := getattr(model, "_gradient_checkpointing_func", None), KeepTables):
        model._gradient_checkpointing_func = again.original
    for attn in attns:
        if isinstance(attn.processor, Borrowed):
            attn.set_processor(attn.processor.original)


class KeepTables:
    """Gradient checkpointing that runs a block again as it ran, whatever forwards came in between.

    Args:
        original: What it takes the place of.
        reorder: Of the blocks; None if tokens are put in order outside of them.
    """

    def __init__(self, original: Callable[..., Any], reorder: Reorder | None = None) -> None:
        self.original, self.reorder = original, reorder

    @classmethod
    def on(cls, model: Any, reorder: Reorder | None = None) -> None:
        """Let a model that is trained with gradient checkpointing keep its tables, and its order."""
        if torch.is_grad_enabled() and model.gradient_checkpointing:
            again = model._gradient_checkpointing_func
            model._gradient_checkpointing_func = again if isinstance(again, cls) else cls(again, reorder)

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Run the block; the backward pass will run it again."""
        processors = [getattr(module, "processor", None) for module in block.modules()]
        tables = [(processor, processor.table) for processor in processors if isinstance(processor, Borrowed)]
        way = self.reorder and self.reorder.way

        def run(*args: Any) -> Any:
            for processor, table in tables:
                processor.table = table
            if self.reorder:
                self.reorder.way = way
            return block(*args)

        return self.original(run, *args)
