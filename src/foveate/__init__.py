"""Foveate: cheaper transformers that attend only where it matters.

Examples:
    >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
    ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
    >>> print(run.summary())
"""

from foveate.diffusers.apply import Handle, apply, remove, summary
from foveate.diffusers.card import Card, register_card
from foveate.diffusers.preset import Preset, load
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
