"""Cached chunks of long contexts for causal language models of `transformers`."""

from foveate.transformers.chunk import ChunkCache
from foveate.transformers.context import Context
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.patched import Patched

__all__ = ["ChunkCache", "ChunkEncoder", "Context", "Patched"]
