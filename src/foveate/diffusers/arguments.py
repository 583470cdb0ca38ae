# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportReturnType=false
"""Arguments of a module's forward pass, what runs in place of it, and how two of a block's reach the backend."""

import inspect
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip
from torch._dynamo.eval_frame import skip_code

from foveate.diffusers.backend import LayerPlan, plan_of
from foveate.diffusers.card import Card
from foveate.utils.cache import FixedMemory

__all__ = ["Argument", "ArgumentsToBackend", "InnermostForward", "Rotations", "UncompiledForward", "arguments_by_name"]


class InnermostForward:
    """`run(forward, *args, **kwargs)` in place of a module's own `forward`, below hooks of diffusers and accelerate.

    Args:
        module: The module, with hooks or without; later ones will be around `run` too.
        run: What to run.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run
        holder, name = next((holder, name) for holder, name in self._places() if getattr(holder, name, None))
        self.original = getattr(holder, name)
        update_wrapper(self, self.original, updated=())
        setattr(holder, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's `forward`."""
        return self.run(self.original, *args, **kwargs)

    def _places(self) -> list[tuple[Any, str]]:
        """Where hooks keep what they run around, and the module itself; the innermost place first."""
        hooks = getattr(getattr(self.module, "_diffusers_hook", None), "_fn_refs", [])
        chain = [(hook, name) for hook in hooks for name in ("original_forward", "forward")]
        return [*chain, (self.module, "_old_forward"), (self.module, "forward")]

    def remove(self) -> None:
        """Give the module its own `forward` back."""
        for holder, name in self._places():
            if vars(holder).get(name) is self:
                setattr(holder, name, self.original)
        if vars(self.module).get("forward") == self.original:  # it is that of the class
            del self.module.forward


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward pass by name, in the order of its signature."""
    names = _names(type(module))
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given[name] for name in names if name in given} | given


class UncompiledForward(InnermostForward):
    """Hooks around a module's own `forward`, below those of others and outside of the compiled code of the module.

    Args:
        module: The module.
        before: Returns the arguments to run it with, given its arguments.
        after: Returns what it shall return, given its output.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__(module, before)
        self.after = after

    @skip  # torch.compiler.disable(recursive=False) would have torch.compile look at it in each call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's `forward`."""
        args, kwargs = self.run(args, kwargs)
        return self.after(self.original(*args, **kwargs))


class Argument:
    """One argument of a module's forward pass, given by position or by name.

    Args:
        module: The module.
        name: Name of the argument; None if there is none. Of several names, the first one that the module has.
    """

    def __init__(self, module: nn.Module, name: str | tuple[str, ...] | None) -> None:
        # names and no position: torch.compile would take a number that differs between blocks for a variable
        self.names = _names(type(module))
        known = (name,) if isinstance(name, str) else name or (None,)
        self.name = next((name for name in known if name in self.names), known[-1])

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value in a call; None if it was not given."""
        given: dict[Any, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        return given.get(self.name)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with another value in its place."""
        kwargs = {name: value if name == self.name else x for name, x in kwargs.items()}
        return tuple(value if name == self.name else x for name, x in zip(self.names, args, strict=False)), kwargs


@cache
def _names(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)[1:]


class Rotations:
    """Rotary embeddings of a forward pass: those of the attention sequence are made once for all blocks.

    Args:
        card: Card of the model.
    """

    def __init__(self, card: Card) -> None:
        self.card, self._memory = card, FixedMemory()
        self.clear(reuse=True)

    def clear(self, *, reuse: bool) -> None:
        """Forget those of the last forward pass, whose memory is used again if `reuse`."""
        self._reuse = reuse
        self._given: Any = None
        self._made: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def of(self, rope: Any, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """(cos, sin) for a layer, from the argument of its block."""
        if self._given is not rope or self._made[0].shape[-2] != plan.local_tokens:
            made = plan.rotation(self.card.rotation(rope))
            self._given, self._made = rope, self._memory.hold(made) if self._reuse else made
        return self._made


class ArgumentsToBackend:
    """A hook on a block that moves arguments into the plans of its layers: the backend uses them, not the processor.

    The backend rotates queries and keys by the rotary embedding while it gathers them: on a GPU one kernel then does
    what many would. It reads and fills the cache of reference keys, since a processor that does so passes no plan on.

    Args:
        block: The block.
        attentions: Its attention modules.
        rotations: Those of the model.
    """

    def __init__(self, block: nn.Module, attentions: list[Any], rotations: Rotations) -> None:
        self.attentions, self.rotations = attentions, rotations
        self.rope, self.cache = (Argument(block, name) for name in (rotations.card.rope, rotations.card.cache))

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the block."""
        take: Any = self.take if torch.compiler.is_compiling() else torch.compiler.disable(self.take)
        return take(args, kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move the arguments: returns those that are left to the block, or None if all are."""
        plans = [plan_of(attn.processor) for attn in self.attentions]
        if not all(plan and plan.pattern is not None for plan in plans):
            return None
        if (rope := self.rope.of(args, kwargs)) is not None:
            for plan in plans:
                if plan.rope is None:  # that of merged tokens is set already
                    compiling = torch.compiler.is_compiling()  # then the backend adds rows for text
                    plan.rope = self.rotations.card.rotation(rope) if compiling else self.rotations.of(rope, plan)
            args, kwargs = self.rope.replaced(args, kwargs, self.rotations.card.unrotated(rope))
        if (options := self.cache.of(args, kwargs)) and options.get("num_ref_tokens"):
            for plan in plans:
                plan.cache = options["kv_cache"]
            args, kwargs = self.cache.replaced(args, kwargs)
        return args, kwargs


# before a compiled block the hook runs uncompiled: a CUDA graph of its own would fill the plans with its tensors
skip_code(ArgumentsToBackend.__call__.__code__)
