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
        name: Name of the argument; None if there is none. Of several names, the first one that the module has.
    """

    def __init__(self, module: nn.Module, name: str | tuple[str, ...] | None) -> None:
        # names and no position: torch.compile would take a number that differs between blocks for a variable
        self.names = _names(type(module))
        known = (name,) if isinstance(name, str) else name or (None,)
        self.name = next((name for name in known if name in self.names), known[-1])

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value in a call; None if it was not given."""
        given: dict[Any, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return given.get(self.name)

    def dropped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with None in its place."""
        kwargs = {name: None if name == self.name else x for name, x in kwargs.items()}
        return tuple(None if name == self.name else x for name, x in zip(self.names, args, strict=False)), kwargs


@cache
def _names(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)[1:]
