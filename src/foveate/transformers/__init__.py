"""Cached contexts and in-context examples for causal language models of `transformers`."""

from foveate.transformers.chunk import ChunkCache
from foveate.transformers.context import Context, Patched, answers
from foveate.transformers.encoder import ChunkEncoder

__all__ = ["ChunkCache", "ChunkEncoder", "Context", "Patched", "answers"]
