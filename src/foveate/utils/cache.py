"""Remember what was worked out from tensors, for as long as they live; make tensors that live long."""

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["WeakTensorCache", "persistent"]

P = ParamSpec("P")
T = TypeVar("T")


def persistent(make: Callable[P, T]) -> Callable[P, T]:
    """Decorator of what makes tensors that outlive the call, the same ones wherever it is called.

    They are made on the CPU under any default device, and may be trained with though inference mode is on.
    """

    @wraps(make)
    def anywhere(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args, **kwargs)

    return anywhere


class WeakTensorCache(Generic[T]):
    """A cache by the identity of tensors that are never changed in place; an entry dies with the last of them.

    Tensors that share their last one, such as tables with the same lists, do not drive each other out.
    """

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for these tensors and this key; it is called once."""
        *others, last = tensors
        entries = self._entries.setdefault(last, {})
        place = *map(id, others), key
        if place not in entries:
            entries[place] = others, make()  # the others are held: no new tensor gets the id of one of them
        return entries[place][1]
