"""Cached contexts and in-context examples for causal language models of `transformers`.

From documents to an answer: a `ChunkEncoder` encodes documents and composes a `Context` (encoder.py). A policy chooses
which of its rows to recompute for a prompt (context.py). A `RowCache` runs these rows and the prompt through the model
(row_cache.py), whose attention (attention.py) is `foveate.ops.row_attention`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foveate.utils.requirements import check_version

if TYPE_CHECKING:
    from foveate.transformers.chunk import ChunkCache
    from foveate.transformers.context import Context, Patched, answers
    from foveate.transformers.encoder import ChunkEncoder

__all__ = ["ChunkCache", "ChunkEncoder", "Context", "Patched", "answers"]

check_version("transformers")

MODULES = {"ChunkCache": "chunk", "ChunkEncoder": "encoder"} | dict.fromkeys(
    ("Context", "Patched", "answers"), "context"
)


def __getattr__(name: str) -> Any:
    """The public names, when they are used: transformers takes seconds to import, and not all modules need it."""
    if name in MODULES:
        return getattr(import_module(f"foveate.transformers.{MODULES[name]}"), name)
    raise AttributeError(f"module 'foveate.transformers' has no attribute {name!r}")
