"""Presets: settings of methods that were measured on one model, with the evidence."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from foveate.methods import METHODS, Method
from foveate.utils.files import write_whole

__all__ = ["PRESETS", "Preset", "describe", "load"]

PRESETS = Path(__file__).parent / "presets"
"""Folder of the presets that come with Foveate."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The methods that `foveate.tune` chose for one model, for `foveate.apply`.

    Examples:
        >>> preset = foveate.load("built-in-128px-ssim-0.95")
        >>> with foveate.apply(pipe, preset):
        ...     image = pipe("an owl above a castle", height=128, width=128).images[0]

    Attributes:
        methods: The methods with their options.
        models: Class and config of each denoiser of the pipeline: the preset is refused by others.
        size: (height, width) in pixels at which it was measured.
        grids: Grids of image tokens at that size; apply warns about others.
        evidence: What was measured: device, versions, score of each held-out picture, times, errors by step and layer.
    """

    methods: tuple[Method, ...]
    models: list[dict[str, Any]]
    size: tuple[int, int]
    grids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The titles of the methods."""
        return " + ".join(method.title for method in self.parts)

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods."""
        return self.methods

    def __repr__(self) -> str:
        return f"Preset({', '.join(map(repr, self.methods))})"

    def check(self, models: Iterable[nn.Module]) -> None:
        """Checks that these are the denoisers that the preset was measured on.

        Raises:
            ValueError: If their class or config is another one; the message names both.
        """
        ours = [describe(model) for model in models]
        if len(ours) == len(self.models):
            pairs = zip(self.models, ours, strict=True)
            if not (differ := [text for pair in pairs if (text := _difference(*pair))]):
                return
            told = differ[0]
        else:
            told = f"the preset is for {_names(self.models)}, and this is {_names(ours)}"
        raise ValueError(f"{told}: presets hold for one model, run foveate.tune on this one")

    def save(self, path: Path | str) -> None:
        """Write the preset as a JSON file."""
        names = {cls: name for name, cls in METHODS.items()}
        content = {
            "methods": [{"method": names[type(method)], "options": asdict(method)} for method in self.methods],
            "models": self.models,
            "size": self.size,
            "grids": self.grids,
            "evidence": self.evidence,
        }
        write_whole(Path(path), json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def load(preset: Path | str) -> Preset:
    """The preset of a JSON file, or one that comes with Foveate, by name.

    Examples:
        >>> with foveate.apply(pipe, foveate.load("preset.json")):
        ...     image = pipe("a lighthouse at dusk").images[0]

    Raises:
        ValueError: If there is no such file or name, or the file is no preset or of another version of foveate.
    """
    path = Path(preset).expanduser()
    if not path.exists():
        shipped = {file.stem: file for file in sorted(PRESETS.glob("*.json"))}
        if str(preset) not in shipped:
            raise ValueError(
                f"there is no preset {preset}: name a file of foveate tune, or one of {', '.join(shipped)}"
            )
        path = shipped[str(preset)]
    try:
        content = json.loads(path.read_text())
        return Preset(
            methods=tuple(METHODS[one["method"]](**_tuples(one["options"])) for one in content["methods"]),
            models=content["models"],
            size=_tuples(content["size"]),
            grids=_tuples(content["grids"]),
            evidence=content["evidence"],
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the preset {path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no preset, or of another version of foveate: make it with foveate tune ({error})"
        ) from error


def describe(model: nn.Module) -> dict[str, Any]:
    """Class and config of a model, as JSON holds them."""
    config: Any = getattr(model, "config", {})
    values = {name: value for name, value in dict(config).items() if not name.startswith("_")}
    return json.loads(json.dumps({"class": type(model).__name__, "config": values}, default=str, sort_keys=True))


def _difference(preset: dict[str, Any], ours: dict[str, Any]) -> str:
    """How a model differs from that of a preset; empty if it does not. Entries of newer versions do not count."""
    config, other = preset["config"], ours["config"]
    differ = [name for name in config if config[name] != other.get(name)]
    if preset["class"] == ours["class"] and not differ:
        return ""
    if preset["class"] != ours["class"]:
        return f"the preset is for {preset['class']}, and this is {ours['class']}"
    theirs, found = (", ".join(f"{name}={values.get(name)}" for name in differ[:3]) for values in (config, other))
    return f"the preset is for a {preset['class']} with {theirs}, and this one has {found}"


def _names(models: list[dict[str, Any]]) -> str:
    return " and ".join(model["class"] for model in models)


def _tuples(value: Any) -> Any:
    """The value with tuples for the lists of JSON."""
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
