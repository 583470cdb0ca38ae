"""Caching of tensors, and of results that depend on tensors."""

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["FixedMemory", "WeakTensorCache", "cached_by_tensor", "persistent"]

P = ParamSpec("P")
T = TypeVar("T")


def persistent(make: Callable[P, T]) -> Callable[P, T]:
    """Decorator for functions whose tensors are cached: their result does not depend on the caller's context.

    The function runs on the CPU whatever the default device is, and outside inference mode, so that its tensors can be
    used in training later.
    """

    @wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args, **kwargs)

    return wrapper


class WeakTensorCache(Generic[T]):
    """A cache keyed by the identity of tensors, which must not be changed in place.

    An entry is freed together with the last tensor of its key. Several keys may share that tensor.
    """

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make()` for these tensors and this key, computed once."""
        *others, last = tensors
        entries = self._entries.setdefault(last, {})
        entry = *map(id, others), key
        if entry not in entries:
            entries[entry] = others, make()  # keeps the other tensors alive, so that no new tensor gets their ids
        return entries[entry][1]


def cached_by_tensor(make: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """Decorator for `persistent` functions of a tensor and hashable arguments: computed once for each.

    Reading a tensor waits for its device, and a pipeline keeps its masks and positions through all steps. A tensor
    that was changed in place is read again.
    """
    cache = WeakTensorCache[T]()
    persistent_make: Callable[..., T] = persistent(make)

    @wraps(make)
    def wrapper(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> T:
        version = None if tensor.is_inference() else tensor._version
        return cache.get([tensor], (version, args, *kwargs.items()), lambda: persistent_make(tensor, *args, **kwargs))

    return wrapper


class FixedMemory:
    """Keeps tensors that are recomputed often at fixed addresses.

    CUDA graphs of `torch.compile` read the tensors of a module at recorded addresses. Other addresses make it record
    the graphs again.
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, ...] = ()

    def hold(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies of the tensors, in the memory of the previous copies if shapes, dtypes and devices match.

        Only for tensors that nothing reads any more when others are held, a backward pass least of all.
        """
        if [*map(_memory_of, self._held)] == [*map(_memory_of, tensors)] and all(
            x.is_inference() == torch.is_inference_mode_enabled() for x in self._held
        ):
            for held, x in zip(self._held, tensors, strict=True):
                held.copy_(x)
        else:
            self._held = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        return self._held


def _memory_of(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device
