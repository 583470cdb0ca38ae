# pyright: basic, reportOptionalSubscript=false, reportArgumentType=false
"""Ways into a model's own forward: cache layers that read or overwrite, attention by rows, queries before rotation."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from foveate.ops.row_attention import row_attention

__all__ = ["Enough", "Reading", "Rows", "borrowed", "by_rows", "dynamic", "unrotated"]

BY_ROWS = "foveate_rows"
TURNS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the implementation is the model's: threads take turns


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
    """Overwrites rows with what is new, and shows all.

    Args:
        rows: Row numbers.
        last: Whether the forward ends here.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, rows: Tensor, last: bool) -> None:
        super().__init__()
        self.rows, self.last = rows, last

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values, these rows anew."""
        self.keys.index_copy_(2, self.rows, key_states)
        self.values.index_copy_(2, self.rows, value_states)
        if self.last:
            raise Enough
        return self.keys, self.values


def borrowed(cache: Any, keys: Iterable[Tensor], values: Iterable[Tensor]) -> Any:
    """The cache with these keys and values [1, groups, rows, dim] in its layers, not copied."""
    for layer, key, value in zip(cache.layers, keys, values, strict=True):
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache


def dynamic(model: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]) -> DynamicCache:
    """The library's own cache; it grows by copies and leaves the tensors as they are."""
    return borrowed(DynamicCache(config=model.config), keys, values)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    rows: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What the library asks of an attention function. The queries are those of `rows`, or the last ones."""
    if rows is None:
        rows = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=key.device)
    return row_attention(query, key, value, rows, scaling).transpose(1, 2), None


AttentionInterface.register(BY_ROWS, _attend)


@contextmanager
def by_rows(model: Any) -> Generator[None]:
    """The model attends by `row_attention` meanwhile: to all keys up to the rows that its forward is told, or is."""
    with TURNS.setdefault(model, RLock()):
        before = model.config._attn_implementation
        model.config._attn_implementation = BY_ROWS
        try:
            yield
        finally:
            model.config._attn_implementation = before


@contextmanager
def unrotated(model: Any, kind: str, layers: Iterable[int]) -> Generator[dict[int, Tensor]]:
    """The queries ("q") or keys ("k") [heads, tokens, dim] of these layers in the next forward, before rotation."""
    taken: dict[int, Tensor] = {}
    ours = get_ident()

    def listen(layer: int) -> Any:
        attention = model.model.layers[layer].self_attn

        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            if get_ident() != ours:  # another thread runs the model
                return
            taken[layer] = output.view(*output.shape[:2], -1, attention.head_dim)[0].transpose(0, 1)

        normed = getattr(attention, f"{kind}_norm", None)
        return (normed or getattr(attention, f"{kind}_proj")).register_forward_hook(keep)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(listen(layer).remove)
        yield taken
