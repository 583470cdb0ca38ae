"""Foveate: cheaper transformers that attend only where it matters.

Examples:
    >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
    ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
    >>> print(run.summary())
"""

from typing import TYPE_CHECKING, Any

from foveate.diffusers.apply import Handle, apply, remove, summary
from foveate.diffusers.card import Card, register_card
from foveate.diffusers.preset import Preset, StepCache, load
from foveate.methods import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA

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

if TYPE_CHECKING:
    from foveate.tuning.tune import Budget, tune


def __getattr__(name: str) -> Any:
    """`tune` and `Budget`, which need Pillow, when they are used."""
    if name in ("Budget", "tune"):
        from foveate.tuning import tune as module

        return getattr(module, name)
    raise AttributeError(f"module 'foveate' has no attribute {name!r}")
