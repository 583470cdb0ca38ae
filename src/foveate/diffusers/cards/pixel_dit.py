"""`PixelDiT`, the model of `foveate train`: it puts its tokens in order itself, and reads words as extra keys."""

from typing import Any

import torch

from foveate.diffusers.backend import LayerPlan
from foveate.diffusers.card import Card
from foveate.methods import LLSA

__all__ = ["PixelDiTCard"]


class PixelDiTCard(Card):
    """`PixelDiT`. Where LLSA is not at work the model is dense, whatever attention it was trained with."""

    blocks = "blocks"

    def check(self, model: Any, methods: tuple[Any, ...]) -> None:
        """Refuse all methods but an LLSA along the model's own curve."""
        if len(methods) != 1 or not isinstance(methods[0], LLSA):
            given = " + ".join(type(method).__name__ for method in methods)
            raise ValueError(f"PixelDiT takes one LLSA and nothing else, not {given}")
        if methods[0].curve != (order := model.config.order):
            raise ValueError(f"this model's tokens are in {order} order: use curve={order}, not {methods[0].curve}")

    def dense_plan(self) -> LayerPlan:
        """Dense attention for layers without a pattern."""
        return LayerPlan(torch.empty(0))
