"""Methods of diffusion models, as the options of commands name them."""

import re
from typing import Any

from foveate.cli.common import options_of
from foveate.diffusers.preset import PRESETS, Preset
from foveate.diffusers.preset import load as load_preset
from foveate.methods import METHODS, ComposedMethod, Method, method_from_text

__all__ = [
    "method_of",
    "method_with_lora",
    "name_of",
    "options_in",
    "read_method",
    "read_methods",
    "read_variant",
]


def read_variant(text: str) -> Method | ComposedMethod | Preset:
    """The preset of a JSON file, or one that comes with Foveate, by name; else as `read_method`."""
    return load_preset(text) if _is_preset(text) else read_method(text)


def read_method(text: str) -> Method | ComposedMethod:
    """The method of "hilberta:tiles=16,centre=0", or the methods of "hilberta:tiles=16+toma:keep=0.5,tile=(8,8)"."""
    parts = [part.partition(":") for part in text.split("+")]
    methods = tuple(method_from_text(name, options_in(options)) for name, _, options in parts)
    return methods[0] if len(methods) == 1 else ComposedMethod(methods)


def read_methods(texts: list[str] | None) -> list[Any]:
    """The methods and presets that `--method` names, one or several times.

    Raises:
        ValueError: If one cannot be read, or is named twice.
    """
    methods = [read_variant(text) for text in texts or []]
    if twice := [text for i, text in enumerate(texts or []) if methods[i] in methods[:i]]:
        raise ValueError(f"--method {twice[0]} is given twice: leave one of them out")
    return methods


def options_in(text: str) -> dict[str, str]:
    """The options of a text such as "keep=0.5, tile=(8,8)" as a dictionary."""
    parts = re.split(r",(?![^(]*\))", text)  # not at a comma within parentheses
    return options_of([part.strip() for part in parts if part.strip()])


def method_of(name: str | None, options: dict[str, str]) -> Method | ComposedMethod | Preset | None:
    """The method of `--method` and its options; None is dense."""
    if name and (set(name) & set("+:") or _is_preset(name)):
        if options and _is_preset(name):
            raise ValueError(f"a preset has its options: leave {', '.join(options)} out, or name a method")
        if options:
            raise ValueError(f"write all options into --method {name}, such as hilberta:tiles=16+toma:keep=0.5")
        return read_variant(name)
    if name not in (None, "dense"):
        return method_from_text(name, options)
    if options:
        raise ValueError(
            f"dense takes no options ({', '.join(options)}): name a method, --method {next(iter(METHODS))}"
        )
    return None


def method_with_lora(distilled: Any, name: str | None, options: dict[str, str]) -> Any:
    """The method to draw with: that of the LoRA, if it is one of foveate."""
    if distilled is None:
        return method_of(name, options)
    from foveate.diffusers.lora import adapted

    return adapted(distilled, method_of(name_of(distilled) if name is None else name, options), set(options))


def name_of(distilled: Any) -> str:
    """Name of the method that a LoRA was distilled for."""
    return next(name for name, cls in METHODS.items() if isinstance(distilled.method, cls))


def _is_preset(text: str) -> bool:
    """Whether a text names a preset, not a method."""
    return text.endswith(".json") or (PRESETS / f"{text}.json").exists()
