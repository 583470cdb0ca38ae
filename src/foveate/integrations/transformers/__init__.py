"""Cached chunks of long contexts for causal language models of `transformers`."""

from foveate.integrations.transformers.chunk import ChunkCache
from foveate.integrations.transformers.context import Context
from foveate.integrations.transformers.encoder import ChunkEncoder
from foveate.integrations.transformers.patched import Patched

__all__ = ["ChunkCache", "ChunkEncoder", "Context", "Patched"]
