# pyright: basic, reportOptionalMemberAccess=false
"""Cached keys and values of reference images, which the backend reads and fills."""

from typing import Any

from torch import nn

from foveate.diffusers.arguments import Argument
from foveate.diffusers.backend import plan_of

__all__ = ["CacheInBackend"]


class CacheInBackend:
    """A hook on a block that hands the cache to the backend: a processor that uses it itself passes no plan on.

    Args:
        block: The block.
        attentions: Its attention modules.
        name: See `Card.cache`.
    """

    def __init__(self, block: nn.Module, attentions: list[Any], name: str) -> None:
        self.attentions, self.options = attentions, Argument(block, name)

    def take(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move the cache from the arguments of the block into the plans of its layers."""
        options = self.options.of(args, kwargs) or {}
        plans = [plan_of(attn.processor) for attn in self.attentions]
        if not options.get("num_ref_tokens") or not all(plan and plan.pattern is not None for plan in plans):
            return None
        for plan in plans:
            plan.cache = options["kv_cache"]
        return self.options.dropped(args, kwargs)
