"""Remember what was worked out from tensors, for as long as they live."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["PerTensors"]

T = TypeVar("T")


class PerTensors(Generic[T]):
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
