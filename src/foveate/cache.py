"""Remember what was worked out from tensors, for as long as they live."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["PerTensors"]

T = TypeVar("T")


class PerTensors(Generic[T]):
    """A cache by the identity of tensors that are never changed in place; an entry dies with the last of them."""

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for these tensors and this key; it is called once."""
        *others, last = tensors
        entry = self._entries.get(last)
        if entry is None or any(a is not b for a, b in zip(entry[0], others, strict=True)):
            entry = self._entries[last] = others, {}
        if key not in entry[1]:
            entry[1][key] = make()
        return entry[1][key]
