"""Cached contexts and in-context examples for causal language models of `transformers`.

From documents to an answer: a `ChunkEncoder` encodes documents and composes a `Context` (encoder.py). A policy chooses
which of its rows to recompute for a prompt (context.py). A `RowCache` runs these rows and the prompt through the model
(row_cache.py), whose attention (attention.py) is `foveate.ops.row_attention`.
"""

from foveate.transformers.chunk import ChunkCache
from foveate.transformers.context import Context, Patched, answers
from foveate.transformers.encoder import ChunkEncoder

__all__ = ["ChunkCache", "ChunkEncoder", "Context", "Patched", "answers"]
