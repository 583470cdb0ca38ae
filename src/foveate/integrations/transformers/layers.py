# pyright: basic, reportOptionalSubscript=false, reportArgumentType=false
"""Ways to listen to a model's own forward: cache layers that read or overwrite; queries and keys before rotation."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

__all__ = ["Enough", "Reading", "Rows", "borrowed", "dynamic", "unrotated"]


class Enough(Exception):
    """Ends a forward whose deeper layers nobody needs."""


class Reading(DynamicLayer):
    """Shows what is stored and then what is new, which it keeps apart: the stored rows are only read.

    Args:
        last: Whether the forward ends here.
    """

    new: Tensor

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stored and new keys and values."""
        self.new = key_states
        if self.last:
            raise Enough
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


class Rows(DynamicLayer):
    """Overwrites rows with what is new, and shows all up to the last of them.

    Args:
        rows: Row numbers.
        end: The row behind the last of them.
        last: Whether the forward ends here.
    """

    def __init__(self, rows: Tensor, end: int, last: bool) -> None:
        super().__init__()
        self.rows, self.end, self.last = rows, end, last

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values up to the last of `rows`, these rows anew."""
        self.keys[:, :, self.rows] = key_states
        self.values[:, :, self.rows] = value_states
        if self.last:
            raise Enough
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


def borrowed(cache: Any, keys: Iterable[Tensor], values: Iterable[Tensor]) -> Any:
    """The cache with these keys and values [1, groups, rows, dim] in its layers, not copied."""
    for layer, key, value in zip(cache.layers, keys, values, strict=True):
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache


def dynamic(model: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]) -> DynamicCache:
    """The library's own cache; it grows by copies and leaves the tensors as they are."""
    return borrowed(DynamicCache(config=model.config), keys, values)


@contextmanager
def unrotated(model: Any, kind: str, layers: Iterable[int]) -> Generator[dict[int, Tensor]]:
    """The queries ("q") or keys ("k") [heads, tokens, dim] of these layers in the next forward, before rotation."""
    taken: dict[int, Tensor] = {}

    def listen(layer: int) -> Any:
        attention = model.model.layers[layer].self_attn

        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            taken[layer] = output.view(*output.shape[:2], -1, attention.head_dim)[0].transpose(0, 1)

        normed = getattr(attention, f"{kind}_norm", None)
        return (normed or getattr(attention, f"{kind}_proj")).register_forward_hook(keep)

    hooks = [listen(layer) for layer in layers]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()
