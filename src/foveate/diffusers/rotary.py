# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportReturnType=false
"""Rotary embeddings, by which the backend rotates queries and keys while it gathers them."""

from typing import Any

import torch
from torch import Tensor, nn

from foveate.diffusers.arguments import Argument
from foveate.diffusers.backend import LayerPlan, plan_of, with_text
from foveate.diffusers.card import Card
from foveate.utils.cache import FixedMemory

__all__ = ["RopeInBackend", "Rotations"]


class Rotations:
    """Rotary embeddings of a forward pass: those of the attention sequence are made once for all blocks.

    Args:
        card: Card of the model.
    """

    def __init__(self, card: Card) -> None:
        self.card, self._memory = card, FixedMemory()
        self.clear()

    def clear(self) -> None:
        """Forget those of the last forward pass."""
        self._given: Any = None
        self._made: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def of(self, rope: Any, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """(cos, sin) for a layer, from the argument of its block."""
        if self._given is not rope or self._made[0].shape[-2] != plan.local_tokens:
            self._given, self._made = rope, self._memory.hold(with_text(self.card.rotation(rope), plan.local_tokens))
        return self._made


class RopeInBackend:
    """A hook on a block that lets the backend rotate queries and keys while it gathers them, not the processor.

    On a GPU one kernel then does what many would.

    Args:
        block: The block.
        attentions: Its attention modules.
        rotations: Those of the model.
    """

    def __init__(self, block: nn.Module, attentions: list[Any], rotations: Rotations) -> None:
        self.attentions, self.rope, self.rotations = attentions, Argument(block, rotations.card.rope), rotations

    def take(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move the rotary embedding from the arguments of the block into the plans of its layers."""
        rope, plans = self.rope.of(args, kwargs), [plan_of(attn.processor) for attn in self.attentions]
        if rope is None or not all(plan and plan.pattern is not None for plan in plans):
            return None
        for plan in plans:
            if plan.rope is None:  # that of merged tokens is set already
                compiling = torch.compiler.is_compiling()  # then the backend adds rows for text
                plan.rope = self.rotations.card.rotation(rope) if compiling else self.rotations.of(rope, plan)
        return self.rope.dropped(args, kwargs)
