"""Methods of diffusion models from the options of commands."""

from collections.abc import Sequence
from typing import Any

__all__ = ["check_distinct", "method_to_draw", "read_methods", "usual_method"]


def _read_variant(text: str) -> Any:
    """Preset of a JSON file, or built-in preset, by name; else as `read_method`. None is dense."""
    from foveate.diffusers.preset import load
    from foveate.methods import read_method

    if text == "dense":
        return None
    return load(text) if _is_preset(text) else read_method(text)


def read_methods(texts: list[str] | None) -> list[Any]:
    """Methods and presets of all `--method` options of commands that always run dense; "dense" adds none.

    Raises:
        ValueError: If one cannot be read, or is named twice.
    """
    methods = [_read_variant(text) for text in texts or []]
    check_distinct(texts or [], methods)
    return [method for method in methods if method is not None]


def check_distinct(texts: Sequence[str], methods: Sequence[Any]) -> None:
    """Raise a ValueError if two texts of `--method` name the same method."""
    if twice := [text for i, text in enumerate(texts) if methods[i] in methods[:i]]:
        raise ValueError(f"--method {twice[0]} is given twice: leave one of them out")


def _method_of(name: str, options: dict[str, str]) -> Any:
    """Method of `--method` and its options; None is dense."""
    from foveate.methods import METHODS, method_from_text

    if not options:
        return _read_variant(name)
    named = ", ".join(options)
    if name == "dense":
        raise ValueError(f"dense takes no options ({named}): name a method, --method {next(iter(METHODS))}")
    if _is_preset(name):
        raise ValueError(f"a preset has its options: leave {named} out, or name a method")
    if set(name) & set("+:"):
        raise ValueError(f"write all options into --method {name}, such as hilberta:tiles=16+toma:keep=0.5")
    return method_from_text(name, options)


def method_to_draw(distilled: Any, name: str | None, options: dict[str, str]) -> Any:
    """Method for generation, None for dense; with a LoRA, the LoRA's method in the layers and steps of the options.

    Args:
        distilled: The method of the LoRA; None without one.
        name: Name of a method, or a text such as hilberta:tiles=16; None is the default.
        options: Options of the method, if the name has none.
    """
    name = usual_method(distilled) if name is None else name
    asked = _method_of(name, options)
    if distilled is None:
        return asked
    from foveate.methods import Method, options_in
    from foveate.pipelines.lora import adapted

    own = options_in(name.partition(":")[2]) if isinstance(asked, Method) else {}
    return adapted(distilled, asked, {*options, *own})


def usual_method(distilled: Any) -> str:
    """Name of the default method: the LoRA's, else dense."""
    if distilled is None:
        return "dense"
    from foveate.methods import METHODS

    return next(name for name, cls in METHODS.items() if isinstance(distilled.method, cls))


def _is_preset(text: str) -> bool:
    """Whether a text names a preset, not a method."""
    from foveate.diffusers.preset import PRESETS

    return text.endswith(".json") or (PRESETS / f"{text}.json").exists()
