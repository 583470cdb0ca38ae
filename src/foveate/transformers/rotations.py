# pyright: basic
"""Rotations of a model's keys to their positions, for all kinds of rotary positions."""

from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cohere2Config, CohereConfig, Glm4Config, GlmConfig

__all__ = ["Rotations", "position_axes"]

ADJACENT = CohereConfig, Cohere2Config, GlmConfig, Glm4Config
"""Families that pair adjacent channels of a head; the others pair those of its two halves."""
ADJACENT_TABLES = CohereConfig, Cohere2Config
"""Families whose tables of cosines have each pair's value twice in a row; the others have all values, then again."""


def position_axes(config: Any) -> int:
    """Number of axes of positions of a text model: 3 in Qwen-VL (time, height and width), else 1."""
    return 3 if "mrope_section" in (config.rope_parameters or {}) else 1


class Rotations:
    """Rotations of a model's keys, as functions of their positions.

    Args:
        decoder: Text model.

    Attributes:
        order: Channel at each place so that `foveate.ops.rotary.rotate`, which pairs channels i and i + dim / 2, turns
            the pairs of this model. None if these are its pairs.
    """

    order: Int[Tensor, "dim"] | None

    def __init__(self, decoder: Any) -> None:
        self._rotary, self._config = decoder.rotary_emb, decoder.config
        self._rope: dict[str, Any] = self._config.rope_parameters or {}
        attentions = [layer.self_attn for layer in decoder.layers]
        self._rotates = [_rotates(attention, self._config) for attention in attentions]
        self._axes, self._dim = position_axes(self._config), attentions[0].head_dim
        share = self._rope.get("partial_rotary_factor") or 1.0
        self._pairs = int(self._dim * share) // 2
        self.order = self._pair_order() if self._pairs < self._dim // 2 or isinstance(self._config, ADJACENT) else None

    def _pair_order(self) -> Int[Tensor, "dim"]:
        rotated = torch.arange(2 * self._pairs)
        pairs = rotated.view(-1, 2).T if isinstance(self._config, ADJACENT) else rotated.view(2, -1)
        others = torch.arange(2 * self._pairs, self._dim).view(2, -1)
        return torch.cat([pairs, others], 1).flatten()

    def __call__(self, positions: Int[Tensor, "axes tokens"], dtype: torch.dtype) -> list[tuple[Any, ...]]:
        """Layers, cosines and sines [tokens, dim] of each run of equal layers, in the order of channels `order`.

        Layers without positions have neither cosines nor sines.
        """
        wide = torch.empty(0, dtype=dtype, device=positions.device)
        at, layers = positions if self._axes == 1 else positions[:, None], range(len(self._rotates))
        kinds = self._config.layer_types if hasattr(self._rotary, "layer_types") else [None] * len(layers)
        runs: list[tuple[Any, ...]] = []
        for (kind, rotates), run in groupby(layers, lambda layer: (kinds[layer], self._rotates[layer])):
            first, *others = run
            tables = self._rotary(wide, at, *([kind] if kind else [])) if rotates else ()
            of_pairs = (self._of_pairs(table, rest) for table, rest in zip(tables, (1.0, 0.0), strict=False))
            runs.append((slice(first, first + 1 + len(others)), *of_pairs))
        return runs

    def _of_pairs(self, table: Tensor, rest: float) -> Float[Tensor, "tokens dim"]:
        """Value of each pair, twice; that of pairs which are not rotated is `rest`."""
        table = table[..., ::2] if isinstance(self._config, ADJACENT_TABLES) else table[..., : self._pairs]
        if table.ndim == 4:  # Qwen2.5-VL: a table for each axis; the axes share out the pairs
            sections = torch.tensor(self._rope["mrope_section"], device=table.device)
            axis = torch.arange(3, device=table.device).repeat_interleave(sections)
            table = table.gather(0, axis.expand_as(table[:1]))
        half = table.flatten(0, -3)[0]
        return pad(half, (0, self._dim // 2 - self._pairs), value=rest).repeat(1, 2)


def _rotates(attention: Any, config: Any) -> bool:
    """Whether a layer has positions: some layers of SmolLM3 and the full ones of Cohere2 do not."""
    if isinstance(config, Cohere2Config):
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))
