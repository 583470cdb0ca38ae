"""Which implementation of an op runs where: the one place where that is decided.

Every op registers its portable definition here, and behind it the kernels that are faster where they run. The last one
registered that takes the work wins.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

__all__ = ["Backend", "backends", "choose", "ops", "register", "register_kernels"]

Takes = Callable[[torch.device, torch.dtype, int], bool]


class Backend(NamedTuple):
    """One implementation of an op."""

    name: str
    takes: Takes
    run: Callable[..., Any]


_BACKENDS: dict[str, list[Backend]] = {}


def register(op: str, name: str, takes: Takes) -> Callable[..., Any]:
    """Decorator that makes a function the backend `name` of `op`, wherever `takes` is true.

    Args:
        op: Name of the op.
        name: Of the backend, as `summary` shows it.
        takes: Whether it runs on a device, in a dtype, at a size: channels of a head, or tokens of a set.
    """

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        _BACKENDS.setdefault(op, []).append(Backend(name, takes, run))
        return run

    return add


def register_kernels(op: str, package: str) -> None:
    """Register the kernels of `op` from `foveate.kernels.<package>`, on machines with an NVIDIA GPU and Triton."""
    if torch.cuda.is_available() and torch.version.hip is None and find_spec("triton"):
        kernels = import_module(f"foveate.kernels.{package}.{op}")
        for name, (takes, run) in kernels.BACKENDS.items():
            register(op, name, takes)(run)


def backends(op: str, device: torch.device, dtype: torch.dtype, size: int) -> list[Backend]:
    """All backends that could run `op` there; the last one does."""
    return [backend for backend in _BACKENDS[op] if backend.takes(device, dtype, size)]


def choose(op: str, device: torch.device, dtype: torch.dtype, size: int) -> Backend:
    """The backend that runs `op` there."""
    return backends(op, device, dtype, size)[-1]


def ops() -> list[str]:
    """Names of all registered ops."""
    return sorted(_BACKENDS)
