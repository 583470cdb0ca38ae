# pyright: basic
"""Arguments of a module's forward pass, which callers may give by position or by name."""

import inspect
from functools import cache
from typing import Any

from torch import nn

__all__ = ["Argument", "arguments_by_name"]


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward pass by name, in the order of its signature."""
    names = _names(type(module))
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given[name] for name in names if name in given} | given


class Argument:
    """One argument of a module's forward pass.

    Args:
        module: The module.
        name: Name of the argument.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        names = _names(type(module))
        self.name, self.place = name, names.index(name) if name in names else len(names)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value in a call; None if it was not given."""
        return args[self.place] if self.place < len(args) else kwargs.get(self.name)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with another value for this one."""
        if self.place < len(args):
            return (*args[: self.place], value, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


@cache
def _names(module: type[nn.Module]) -> list[str]:
    return list(inspect.signature(module.forward).parameters)[1:]
