"""Foveate: cheaper transformers that attend only where it matters.

Examples:
    >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
    ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
    >>> print(run.summary())
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveate.diffusers.apply import Handle, apply, remove, summary
    from foveate.diffusers.card import Card, register_card
    from foveate.diffusers.preset import Preset, StepCache, load
    from foveate.methods import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA
    from foveate.tuning.tune import Budget, tune

__all__ = [
    "LLSA",
    "Budget",
    "Card",
    "Handle",
    "HilbertA",
    "InfoFlowKV",
    "Preset",
    "StepCache",
    "SubCP",
    "ToMA",
    "__version__",
    "apply",
    "load",
    "register_card",
    "remove",
    "summary",
    "tune",
]


__version__ = "0.1.0"

MODULES = {
    "diffusers.apply": ("Handle", "apply", "remove", "summary"),
    "diffusers.card": ("Card", "register_card"),
    "diffusers.preset": ("Preset", "StepCache", "load"),
    "methods": ("LLSA", "HilbertA", "InfoFlowKV", "SubCP", "ToMA"),
    "tuning.tune": ("Budget", "tune"),
}
"""The modules of the public names, which are imported when a name is used: PyTorch takes a second."""


def __getattr__(name: str) -> Any:
    for module, names in MODULES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"foveate.{module}"), name)
            return value
    if not name.startswith("_") and find_spec(f"foveate.{name}"):  # a room, such as foveate.methods
        return import_module(f"foveate.{name}")
    raise AttributeError(f"module 'foveate' has no attribute {name!r}")
