# pyright: basic, reportOptionalSubscript=false, reportArgumentType=false
"""Hooks into a model's own forward pass: special cache layers, attention by rows, and queries before rotation."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from threading import RLock, get_ident
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

from foveate.ops.row_attention import row_attention

__all__ = [
    "OverwriteLayer",
    "ReadOnlyLayer",
    "StopForward",
    "attend_by_rows",
    "capture_unrotated",
    "fill",
    "row_index",
]

ROW_ATTENTION = "foveate_rows"
# `attend_by_rows` changes the model's config for a while, so threads that share a model take turns
LOCKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class StopForward(Exception):
    """Ends a forward pass whose deeper layers are not needed."""


class ReadOnlyLayer(DynamicLayer):
    """A cache layer that shows stored and new keys and values to attention, and keeps only the stored ones.

    Args:
        last: Whether the forward pass ends at this layer.

    Attributes:
        new: Keys that the forward pass added.
    """

    new: Tensor

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stored keys and values, followed by the new ones."""
        self.new = key_states
        if self.last:
            raise StopForward
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


class OverwriteLayer(DynamicLayer):
    """A cache layer that overwrites chosen rows in place, and shows all rows to attention.

    Args:
        rows: Row numbers, for each context of the batch.
        last: Whether the forward pass ends at this layer.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, rows: Int[Tensor, "batch chosen"], last: bool) -> None:
        super().__init__()
        self.rows, self.last = rows, last

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, with the new ones in the chosen rows."""
        index = row_index(self.rows, self.keys)
        self.keys.scatter_(2, index, key_states)
        self.values.scatter_(2, index, value_states)
        if self.last:
            raise StopForward
        return self.keys, self.values


def row_index(
    rows: Int[Tensor, "batch chosen"], states: Float[Tensor, "batch groups rows dim"]
) -> Int[Tensor, "batch groups chosen dim"]:
    """Index for `gather` and `scatter_` that selects these rows of keys or values."""
    return rows[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])


def fill(cache: Any, keys: Iterable[Tensor], values: Iterable[Tensor]) -> Any:
    """The cache, its layers holding these keys and values [batch, groups, rows, dim] without copying them."""
    for layer, key, value in zip(cache.layers, keys, values, strict=True):
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache


def _attend(
    module: Any,
    query: Float[Tensor, "batch heads chosen dim"],
    key: Float[Tensor, "batch groups tokens dim"],
    value: Float[Tensor, "batch groups tokens dim"],
    attention_mask: None,
    scaling: float,
    rows: Int[Tensor, "batch chosen"] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for `AttentionInterface`: each query sees the keys up to its own row, by default the last."""
    if rows is None:
        rows = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=key.device)[None]
    if len(rows) == 1:
        out = row_attention(query, key, value, rows[0], scaling)
    else:  # every context has rows of its own
        mask = rows[:, None, :, None] >= torch.arange(key.shape[2], device=key.device)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(ROW_ATTENTION, _attend)


@contextmanager
def attend_by_rows(model: Any) -> Generator[None]:
    """Let the model attend by rows inside a `with` block: each query to all keys up to its own row.

    A forward pass takes the rows as the keyword `rows` [batch, chosen]; without it, queries are the last rows.
    """
    with LOCKS.setdefault(model, RLock()):
        before = model.config._attn_implementation
        model.config._attn_implementation = ROW_ATTENTION
        try:
            yield
        finally:
            model.config._attn_implementation = before


@contextmanager
def capture_unrotated(
    model: Any, kind: Literal["q", "k"], layers: Iterable[int]
) -> Generator[dict[int, Float[Tensor, "batch heads tokens dim"]]]:
    """Capture the queries or keys of these layers before rotation, in a forward pass inside a `with` block."""
    captured: dict[int, Tensor] = {}
    thread = get_ident()

    def capture(layer: int) -> Any:
        attention = model.model.layers[layer].self_attn

        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            if get_ident() == thread:  # another thread may run the model meanwhile
                captured[layer] = output.view(*output.shape[:2], -1, attention.head_dim).transpose(1, 2)

        norm = getattr(attention, f"{kind}_norm", None)
        return (norm or getattr(attention, f"{kind}_proj")).register_forward_hook(keep)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(capture(layer).remove)
        yield captured
