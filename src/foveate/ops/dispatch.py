"""Which implementation of an op runs on a device: the one place where that is decided.

Every op registers its portable definition here; kernels register faster twins for the devices they can drive. The last
one registered that takes a device wins.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Backend", "choose", "ops", "register"]


class Backend(NamedTuple):
    """One implementation of an op."""

    name: str
    takes: Callable[[torch.device], bool]
    run: Callable[..., Any]


_BACKENDS: dict[str, list[Backend]] = {}


def register(op: str, name: str, takes: Callable[[torch.device], bool]) -> Callable[..., Any]:
    """Decorator that makes a function the backend `name` of `op`, on the devices for which `takes` is true."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        _BACKENDS.setdefault(op, []).append(Backend(name, takes, run))
        return run

    return add


def choose(op: str, device: torch.device) -> Backend:
    """The backend that runs `op` on `device`."""
    for backend in reversed(_BACKENDS[op]):
        if backend.takes(device):
            return backend
    raise ValueError(f"no backend runs {op} on {device}")


def ops() -> list[str]:
    """Names of all registered ops."""
    return sorted(_BACKENDS)
