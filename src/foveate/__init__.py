"""Foveate: cheaper transformers that attend only where it matters.

Examples:
    >>> with foveate.apply(pipe, foveate.HilbertA(tiles=16)) as run:
    ...     image = pipe("a lighthouse at dusk", height=2048, width=2048).images[0]
    >>> print(run.summary())
"""

from foveate.diffusers.apply import Handle, apply, remove, summary
from foveate.diffusers.card import Card, register_card
from foveate.methods import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA

__all__ = [
    "LLSA",
    "Card",
    "Handle",
    "HilbertA",
    "InfoFlowKV",
    "SubCP",
    "ToMA",
    "__version__",
    "apply",
    "register_card",
    "remove",
    "summary",
]


__version__ = "0.1.0"
