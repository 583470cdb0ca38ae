"""Apply methods to a diffusers pipeline and remove them again."""

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from foveate.diffusers.card import card_of
from foveate.diffusers.preset import Preset
from foveate.diffusers.summary import Summary
from foveate.methods import ComposedMethod, Method
from foveate.utils.requirements import check_version

if TYPE_CHECKING:  # importing foveate does not import diffusers
    from foveate.diffusers.adapter import ModelAdapter

__all__ = ["Handle", "apply", "denoisers", "remove", "summary"]

log = logging.getLogger("foveate")

DENOISERS = ("transformer", "transformer_2", "transformer_ref", "unconditional_transformer", "unet")


class Handle:
    """Methods at work in one or several models; as a context manager it removes them at the end, also on errors."""

    def __init__(self, adapters: dict[str, "ModelAdapter"]) -> None:
        self._adapters = adapters

    def remove(self) -> None:
        """Remove the methods: the models are exactly as before. Calling it twice is fine."""
        self._replaced()
        for adapter in self._adapters.values():
            adapter.remove()
            _reset_compiled(adapter)

    def summary(self) -> Summary:
        """What each layer did in the last forward pass with a method at work, or why there was none. Print it."""
        return Summary(
            {name: adapter.report() for name, adapter in self._adapters.items()},
            {name: adapter.outcomes for name, adapter in self._adapters.items()},
            self._replaced(),
            {name: adapter.skipped for name, adapter in self._adapters.items()},
            {name: adapter.skipped_pairs() for name, adapter in self._adapters.items()},
        )

    def __repr__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def plans(self) -> dict[str, Any]:
        """The plans of the methods in the last forward pass of each denoiser, without those that stayed dense."""
        return {name: adapter.plan for name, adapter in self._adapters.items() if adapter.plan is not None}

    def attends_sparsely(self) -> bool:
        """Whether sparse attention works in the current forward pass, or did in the last one."""
        return any(stack.attention for adapter in self._adapters.values() for stack in adapter.now.decisions.values())

    @contextmanager
    def paused(self) -> Generator[None]:
        """Context in which every forward pass of this thread is dense, for example the teacher's in a distillation."""
        before = {adapter.clock.caller: adapter.clock.caller.paused for adapter in self._adapters.values()}
        for caller in before:
            caller.paused = True
        try:
            yield
        finally:
            for caller, paused in before.items():
                caller.paused = paused

    @contextmanager
    def image(self, pipeline: Any = None) -> Generator[None]:
        """Context in which your own loop over timesteps generates one image, or one batch of images, in this thread.

        Pipelines need no such context. Without it, token merging makes a new plan in every forward pass of the loop.

        Examples:
            >>> with run.image():
            ...     for t in timesteps:
            ...         latents = step(model(latents, t), latents)

        Args:
            pipeline: The pipeline whose scheduler the loop steps, which then tells the step. None: each smaller
                timestep begins a new step, and `start_percent` follows the timestep.
        """
        with ExitStack() as stack:
            for adapter in self._adapters.values():
                stack.enter_context(adapter.clock.image(pipeline))
            yield

    def _replaced(self) -> frozenset[str]:
        """Denoisers that the pipeline got since `apply`; they run dense, and the log says so."""
        pipeline = next((adapter.clock.pipeline for adapter in self._adapters.values()), None)
        models = {name: _unwrapped(getattr(pipeline, name, None)) for name in DENOISERS}
        known = [None, *(adapter.model for adapter in self._adapters.values())]
        replaced = frozenset(name for name, model in models.items() if not any(model is one for one in known))
        for name in replaced:
            log.warning("the pipeline has another %s since apply, which is dense: apply again", name)
        return replaced

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def apply(target: Any, *methods: Method | ComposedMethod | Preset) -> Handle:
    """Run a diffusers pipeline or model with these methods until the returned handle is removed.

    Examples:
        >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
        ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
        >>> print(run.summary())

    Args:
        target: A pipeline, modular or not, with a `transformer`, `transformer_2`, `transformer_ref`,
            `unconditional_transformer` or `unet`, or such a model itself.
        *methods: One method of sparse attention, one of token merging, or both; or a preset alone.

    Raises:
        ValueError: If no method is given, the target has no denoiser, its model class has no card, methods are
            already applied, an option does not fit the model, the preset is for another model, or it brings a step
            cache and the model has one already.
        ImportError: If diffusers is installed in a version that Foveate does not know.
    """
    check_version("diffusers")
    if not methods:
        raise ValueError("nothing to apply: name a method, for example foveate.apply(pipe, foveate.HilbertA())")
    for method in methods:
        if not isinstance(method, Method | ComposedMethod | Preset):
            raise ValueError(f"not a method: {method!r}; pass an instance such as foveate.HilbertA()")
    preset = next((method for method in methods if isinstance(method, Preset)), None)
    if preset and len(methods) > 1:
        raise ValueError("a preset has all its methods: apply it alone")
    parts = tuple(part for method in methods for part in method.parts)
    models = {name: _unwrapped(model) for name, model in denoisers(target).items()}
    if preset:
        preset.check(models.values())
    cards = {name: card_of(model) for name, model in models.items()}

    from foveate.diffusers.adapter import ModelAdapter

    for name, model in models.items():
        if ModelAdapter.of(model):
            raise ValueError(
                f"methods are already applied to {name}: pass all of them to one foveate.apply(...), or call "
                "foveate.remove(...) first; a second pipeline that shares the model generates with them already"
            )
    pipeline = None if isinstance(target, torch.nn.Module) else target
    adapters: dict[str, ModelAdapter] = {}
    try:
        for name, model in models.items():
            adapters[name] = ModelAdapter(model, cards[name], parts, pipeline, preset)
            _reset_compiled(adapters[name])
    except BaseException:
        Handle(adapters).remove()
        raise
    return Handle(adapters)


def remove(target: Any) -> None:
    """Remove all methods from a pipeline or model, with or without its handle; also from a deep copy of one."""
    _applied(target).remove()


def summary(target: Any) -> Summary:
    """What the methods in a pipeline or model did: see `Handle.summary`."""
    return _applied(target).summary()


def _applied(target: Any) -> Handle:
    """The methods at work in a pipeline or model."""
    from foveate.diffusers.adapter import ModelAdapter

    adapters = {name: ModelAdapter.of(model) for name, model in denoisers(target).items()}
    return Handle({name: adapter for name, adapter in adapters.items() if adapter})


def denoisers(target: Any) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline by name; a model is its own.

    Raises:
        ValueError: If a pipeline has none.
    """
    if isinstance(target, torch.nn.Module):
        return {type(_unwrapped(target)).__name__: target}
    found = {name: model for name in DENOISERS if (model := getattr(target, name, None)) is not None}
    if found:
        return found
    name, missing = type(target).__name__, [name for name in DENOISERS if hasattr(target, name)]
    if missing:
        load = "load_components" if hasattr(target, "load_components") else "from_pretrained"
        raise ValueError(f"this {name} has not loaded its {' and '.join(missing)}: call {load}(...) first")
    if hasattr(target, "init_pipeline"):
        raise ValueError(f"{name} are blocks of a modular pipeline: pass the pipeline that runs them")
    raise ValueError(
        f"{name} has no {', '.join(DENOISERS)}: pass a diffusers pipeline with a denoiser, or the denoiser itself"
    )


def _unwrapped(model: Any) -> Any:
    """The model without the wrapper of `torch.compile`."""
    return getattr(model, "_orig_mod", model)


def _reset_compiled(adapter: "ModelAdapter") -> None:
    """Have compiled code compiled anew: it ignores hooks that were added or removed inside of it."""
    has_compiled_code = adapter.model._compiled_call_impl is not None
    if adapter.hooks_inside:  # parts may be compiled too, and torch.compile leaves no mark on them
        has_compiled_code = bool(torch._dynamo.convert_frame.input_codes.seen)
    if has_compiled_code:
        log.warning("hooks changed in a compiled model: torch._dynamo is reset, this process compiles anew")
        torch._dynamo.reset()
