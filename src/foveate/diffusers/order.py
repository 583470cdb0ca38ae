# pyright: basic, reportAttributeAccessIssue=false
"""Tokens in the order of a method between two places of a model, and in raster order outside of them."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foveate.methods.base import AttentionPlan
from foveate.ops.merging import Regions

__all__ = ["Reorder", "along", "by_name"]


def along(order: Tensor, x: Tensor, dim: int = 1) -> Tensor:
    """Tokens in that order."""
    return x.index_select(dim, order.to(x.device))


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward by their names, in the order of its signature."""
    names = _arguments(type(model))
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given[name] for name in names if name in given} | given


@cache
def _arguments(model: type[nn.Module]) -> list[str]:
    return list(inspect.signature(model.forward).parameters)[1:]


class Reorder:
    """Hooks that put tokens in order, and back. They stay outside of compiled code: each would be a graph of its own.

    Attributes:
        way: The order of this forward, and its inverse; None is raster order.
    """

    def __init__(self) -> None:
        self.way: Regions | AttentionPlan | None = None
        self.handles: list[RemovableHandle] = []

    def between(self, enter: nn.Module, leave: nn.Module) -> None:
        """Put tokens in order behind one module and back behind another."""
        self.handles += [enter.register_forward_hook(self.order), leave.register_forward_hook(self.restore)]

    def before(self, block: nn.Module) -> None:
        """Put tokens in order before a block."""
        self.handles.append(block.register_forward_pre_hook(self.order_input))

    def behind(self, block: nn.Module) -> None:
        """Put tokens back behind a block."""
        self.handles.append(block.register_forward_hook(self.restore))

    @torch.compiler.disable
    def order_input(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Of a module whose first argument is the tokens."""
        return args if self.way is None else (along(self.way.order, args[0]), *args[1:])

    @torch.compiler.disable
    def order(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Of a module that returns the tokens."""
        return output if self.way is None else along(self.way.order, output)

    @torch.compiler.disable
    def restore(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Raster order again."""
        return output if self.way is None else along(self.way.inverse, output)
