"""Put methods into a pipeline and take them out again.

What is specific to a model family lives in a file of its own (`flux.py`); `FAMILIES` says which one.
"""

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from foveate.diffusers.family import Family
from foveate.diffusers.summary import Summary
from foveate.methods import Method
from foveate.methods.base import SparseAttention

__all__ = ["FAMILIES", "Handle", "apply", "remove", "summary"]

log = logging.getLogger("foveate")

FAMILIES = {
    "FluxTransformer2DModel": "foveate.diffusers.flux:Flux",
    "UNet2DConditionModel": "foveate.diffusers.blocks:UNet",
    "SD3Transformer2DModel": "foveate.diffusers.blocks:SD3",
    "PixArtTransformer2DModel": "foveate.diffusers.blocks:PixArt",
    "DiTTransformer2DModel": "foveate.diffusers.blocks:DiT",
    "PixelDiT": "foveate.diffusers.pixel:Pixel",
}
"""Which class serves which diffusers model, both by name: nothing is imported before it is needed."""

SPARSE = {
    "UNet2DConditionModel": "foveate.diffusers.sparse_blocks:SparseUNet",
    "SD3Transformer2DModel": "foveate.diffusers.sparse_blocks:SparseBlocks",
    "PixArtTransformer2DModel": "foveate.diffusers.sparse_blocks:SparseBlocks",
    "DiTTransformer2DModel": "foveate.diffusers.sparse_blocks:SparseBlocks",
}
"""The same for models that another class serves where a method of sparse attention is applied."""

DENOISERS = ("transformer", "transformer_2", "unet")


class Handle:
    """Methods at work in a model; as a context manager it removes them at the end, also after an exception."""

    def __init__(self, families: dict[str, Family]) -> None:
        self._families = families

    def remove(self) -> None:
        """Take the methods out: original processors back, every hook gone. Doing it twice is fine."""
        for family in self._families.values():
            _take_out(family)

    def summary(self) -> Summary:
        """What each layer did in the last sparse forward, or why there was none. Print it for a table."""
        return _summary(self._families)

    def plans(self) -> dict[str, Any]:
        """What the methods decided for the last forward of each denoiser; without those that were dense."""
        return {name: family.plan for name, family in self._families.items() if family.plan is not None}

    @contextmanager
    def paused(self) -> Generator[None]:
        """Within it every forward is dense, with the methods still in place: the teacher of a distillation."""
        before = {family: family.paused for family in self._families.values()}
        for family in before:
            family.paused = True
        try:
            yield
        finally:
            for family, paused in before.items():
                family.paused = paused

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def apply(target: Any, *methods: Method) -> Handle:
    """Make a diffusers pipeline, or a bare denoiser, run with these methods until the handle is removed.

    Examples:
        >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
        ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
        >>> print(run.summary())

    Args:
        target: A pipeline with a `transformer`, `transformer_2` or `unet`, or such a model itself.
        *methods: What to apply, at least one.

    Raises:
        ValueError: If there is nothing to apply or nothing to apply it to, the model's family is not supported,
            methods are already applied, or a setting does not fit the model.
    """
    if not methods:
        raise ValueError("nothing to apply: name a method, for example foveate.apply(pipe, foveate.HilbertA())")
    for method in methods:
        if not isinstance(method, Method):
            raise ValueError(f"not a method: {method!r}; pass an instance such as foveate.HilbertA()")
    models = _denoisers(target)
    for name, model in models.items():
        if Family.of(model):
            raise ValueError(
                f"methods are already applied to {name}: they never stack; pass all of them to one "
                "foveate.apply(...), or call foveate.remove(...) first"
            )
    pipeline = None if isinstance(target, torch.nn.Module) else target
    families: dict[str, Family] = {}
    try:
        for name, model in models.items():
            families[name] = _family(model, methods)(model, methods, pipeline)
            _reset_compiled(families[name])
    except BaseException:
        Handle(families).remove()
        raise
    return Handle(families)


def remove(target: Any) -> None:
    """Take all methods out of a pipeline or model, with or without its handle; a deep copy is cleaned just so."""
    for model in _denoisers(target).values():
        if family := Family.of(model):
            _take_out(family)


def summary(target: Any) -> Summary:
    """What the methods in a pipeline or model did: see `Handle.summary`."""
    applied = {name: Family.of(model) for name, model in _denoisers(target).items()}
    return _summary({name: family for name, family in applied.items() if family})


def _summary(families: dict[str, Family]) -> Summary:
    return Summary(
        {name: family.report() for name, family in families.items()},
        {name: family.outcomes for name, family in families.items()},
    )


def _denoisers(target: Any) -> dict[str, torch.nn.Module]:
    if isinstance(target, torch.nn.Module):
        found = {type(_unwrapped(target)).__name__: target}
    else:
        found = {name: model for name in DENOISERS if (model := getattr(target, name, None)) is not None}
    if not found:
        raise ValueError(
            f"{type(target).__name__} has no {', '.join(DENOISERS)}: pass a diffusers pipeline with a denoiser, "
            "or the denoiser itself"
        )
    return {name: _unwrapped(model) for name, model in found.items()}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


def _family(model: torch.nn.Module, methods: tuple[Method, ...]) -> type[Family]:
    if type(model).__name__ not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__} is not supported: foveate knows {', '.join(FAMILIES)}; "
            "docs/add-a-model.md shows how to add one"
        )
    sparse = SPARSE if len(methods) == 1 and isinstance(methods[0], SparseAttention) else {}
    module, name = (FAMILIES | sparse)[type(model).__name__].split(":")
    return getattr(importlib.import_module(module), name)


def _take_out(family: Family) -> None:
    family.remove()
    _reset_compiled(family)


def _reset_compiled(family: Family) -> None:
    """Hooks that come or go inside a region that is already compiled are ignored: have it compiled again."""
    anything = bool(torch._dynamo.convert_frame.input_codes.seen)  # torch.compile(model) leaves no mark on the model
    if anything if family.hooks_inside else family.model._compiled_call_impl is not None:
        log.warning("hooks changed in a compiled model: torch._dynamo is reset, this process compiles anew")
        torch._dynamo.reset()
