"""Presets: settings of methods and of a step cache that were measured on one model, with the evidence."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from foveate.methods import METHODS, Method
from foveate.utils.choices import check_options
from foveate.utils.files import write_whole

__all__ = ["PRESETS", "Preset", "StepCache", "describe", "load"]

PRESETS = Path(__file__).parent / "presets"
"""Folder of the presets that come with Foveate."""


@dataclass(frozen=True, kw_only=True)
class StepCache:
    """First Block Cache of diffusers: most blocks of a step are skipped if its first block changes little.

    They add what they added in the last computed step.

    Attributes:
        threshold: Relative change of what the first block adds, up to which a step is skipped.
        start_percent: Fraction of the denoising steps, 0 to 1, before which all steps are computed.

    Raises:
        ValueError: If an option is out of its range.
    """

    threshold: float
    start_percent: float = 0.0

    def __post_init__(self) -> None:
        check_options(self)
        if not self.threshold >= 0:
            raise ValueError(f"threshold is a relative change, 0 or more, not {self.threshold}")
        if not 0 <= self.start_percent <= 1:
            raise ValueError(f"start_percent is a fraction of the run, 0 to 1, not {self.start_percent}")

    @property
    def title(self) -> str:
        """Name and options, for pages and tables."""
        late = f", start_percent={self.start_percent:g}" if self.start_percent else ""
        return f"step cache threshold={self.threshold:g}{late}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The methods and the step cache that `foveate.tune` chose for one model, for `foveate.apply`.

    Examples:
        >>> preset = foveate.load("built-in-128px-ssim-0.95")
        >>> with foveate.apply(pipe, preset):
        ...     image = pipe("an owl above a castle", height=128, width=128).images[0]

    Attributes:
        methods: The methods with their options; none if the step cache is alone.
        cache: When steps are skipped; None: never.
        models: Class and config of each denoiser of the pipeline: the preset is refused by others.
        size: (height, width) in pixels at which it was measured.
        grids: Grids of image tokens at that size; apply warns about others.
        evidence: What was measured: device, versions, score of each held-out picture, times, errors by step and layer.
    """

    methods: tuple[Method, ...]
    models: list[dict[str, Any]]
    size: tuple[int, int]
    cache: StepCache | None = None
    grids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.methods and self.cache is None:
            raise ValueError("a preset needs a method or a step cache")

    @property
    def title(self) -> str:
        """The titles of the methods and of the step cache."""
        return " + ".join(part.title for part in (*self.methods, self.cache) if part)

    @property
    def steps(self) -> int | None:
        """Number of denoising steps at which it was measured; None if the evidence does not tell."""
        return self.evidence.get("steps")

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods."""
        return self.methods

    def __repr__(self) -> str:
        return f"Preset({', '.join(repr(part) for part in (*self.methods, self.cache) if part)})"

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
            "cache": self.cache and asdict(self.cache),
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
            cache=StepCache(**content["cache"]) if content.get("cache") else None,
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
