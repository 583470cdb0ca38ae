"""Registry of the implementations of each op: which backend runs on which device, dtype and size.

Every op registers its portable definition here first, then the faster kernels. The last registered backend that
supports a call runs it.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

__all__ = ["Backend", "backends", "choose", "ops", "register", "register_kernels"]

Supports = Callable[[torch.device, torch.dtype, int], bool]


class Backend(NamedTuple):
    """One implementation of an op.

    Attributes:
        name: Name of the backend, shown by `summary`.
        supports: Function of device, dtype and size (head_dim, or tokens of a set): whether the backend runs.
        run: The implementation.
    """

    name: str
    supports: Supports
    run: Callable[..., Any]


_BACKENDS: dict[str, list[Backend]] = {}


def register(op: str, name: str, supports: Supports = lambda *call: True) -> Callable[..., Any]:
    """Decorator that registers a function as the backend `name` of `op`.

    Args:
        op: Name of the op.
        name: Name of the backend.
        supports: Function of device, dtype and size: whether the backend runs; by default always.
    """

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        _BACKENDS.setdefault(op, []).append(Backend(name, supports, run))
        return run

    return add


def register_kernels(op: str, package: str) -> None:
    """Register ``BACKENDS`` of ``kernels.<package>.<op>`` if an NVIDIA GPU and Triton are available."""
    if torch.cuda.is_available() and torch.version.hip is None and find_spec("triton"):
        kernels = import_module(f"..kernels.{package}.{op}", __package__)
        for name, (supports, run) in kernels.BACKENDS.items():
            register(op, name, supports)(run)


def backends(op: str, device: torch.device, dtype: torch.dtype, size: int) -> list[Backend]:
    """Backends that support a call of `op`, in the order of registration; the last one runs it."""
    return [backend for backend in _BACKENDS[op] if backend.supports(device, dtype, size)]


def choose(op: str, device: torch.device, dtype: torch.dtype, size: int, *, portable: bool = False) -> Backend:
    """Backend that runs a call of `op`; with `portable`, the portable definition."""
    return backends(op, device, dtype, size)[0 if portable else -1]


def ops() -> list[str]:
    """Names of all registered ops."""
    return sorted(_BACKENDS)
