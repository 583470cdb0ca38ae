# pyright: basic, reportPrivateImportUsage=false
"""Encoding of documents into cached chunks, and composition of chunks into a context."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.transformers.attention import capture_unrotated_keys
from foveate.transformers.chunk import ChunkCache, check_fingerprint
from foveate.transformers.context import Context
from foveate.transformers.model import Document, LanguageModel, ReadDocument
from foveate.transformers.row_cache import RowCache
from foveate.transformers.tokens import Tokens
from foveate.utils.device import dtype_name

__all__ = ["ChunkEncoder"]

ENCODE_ROWS = 2048
"""Largest number of rows in a forward pass over several documents of equal length."""


class ChunkEncoder(LanguageModel):
    """Encodes documents, each alone, and composes contexts from their caches.

    Make a new encoder after the model's weights or adapters have changed.

    Examples:
        >>> encoder = ChunkEncoder(model, tokenizer)
        >>> chunks = encoder.encode(documents)
        >>> context = encoder.compose([chunks[2], chunks[0]])
        >>> with context.patch(foveate.InfoFlowKV(), "Question: who was it? Answer:") as patched:
        ...     print(patched.generate())

    Args:
        model: Causal language model of a family that `check_config` accepts, in evaluation mode. It is never changed.
        tokenizer: Tokenizer of the model.
        prefix: Text or token ids before every context, and before each document while it is encoded. Names of control
            tokens take effect here, not in documents and prompts. None is the tokenizer's start-of-text token, or
            nothing if it has none.
        process_group: Processes of `torch.distributed` that divide the documents: each encodes and keeps some, and all
            must make the same calls. None: this process does all.

    Raises:
        ValueError: If the model is not supported, with the reason.
    """

    def encode(self, texts: Sequence[Document]) -> list[ChunkCache]:
        """Caches of the documents. All documents are checked before the first is encoded.

        Args:
            texts: Documents: a text, token ids, or, for a vision-language model, a list of texts and images (PIL).

        Raises:
            ValueError: If a document is empty, longer than the model's context, or overflows the model's dtype, or it
                holds images and the model does not see, or was given without its processor.
        """
        if isinstance(texts, str):
            raise ValueError(f"pass a list of documents, not one text: [{texts[:20]!r}]")
        documents = [self.read(text) for text in texts]
        self._check_documents(documents)
        encoded = iter(self.encode_read([document for i, document in enumerate(documents) if self.keeps(i)]))
        chunks = (next(encoded) if self.keeps(i) else None for i in range(len(documents)))
        return [self.share(i, chunk, read.ids) for i, (chunk, read) in enumerate(zip(chunks, documents, strict=True))]

    def keeps(self, number: int) -> bool:
        """Whether this process keeps the keys and values of chunk `number` of a context."""
        return self.division is None or self.division.holder(number) == self.division.rank

    def share(self, number: int, chunk: ChunkCache | None, ids: Int[Tensor, "tokens"]) -> ChunkCache:
        """Chunk `number` of a context, marked with the rank that keeps it. Other ranks pass None for `chunk`."""
        chunk = chunk or ChunkCache(ids.to(self.device), {}, dict(self.fingerprint))
        return chunk if self.division is None else replace(chunk, holder=self.division.holder(number))

    def _holder(self, number: int, chunk: ChunkCache) -> int | None:
        """Rank of the process that keeps a chunk of a context."""
        if self.division is None:
            chunk.check_here()
            return None
        return self.division.holder(number) if chunk.holder is None else chunk.holder

    def _check_documents(self, documents: Sequence[ReadDocument]) -> None:
        for i, document in enumerate(documents):
            if not len(document.ids):
                raise ValueError(f"document {i} is empty: leave it out")
            tokens = len(self.prefix) + len(document.ids)
            self.check_length(tokens, f"document {i} with its prefix", "split it")

    def encode_read(self, documents: Sequence[ReadDocument]) -> list[ChunkCache]:
        """Caches, in this process, of documents that `read` has tokenized."""
        self._check_documents(documents)
        chunks: list[ChunkCache] = []
        for length, same in groupby(documents, key=lambda document: len(document.ids)):
            group, most = list(same), max(1, ENCODE_ROWS // length)
            for start in range(0, len(group), most):
                for chunk in self._encode(group[start : start + most]):
                    if not (chunk.keys.isfinite() & chunk.values.isfinite()).all():
                        dtype = dtype_name(self.dtype)
                        raise ValueError(
                            f"document {len(chunks)} overflows {dtype}: load the model in bfloat16 or float32"
                        )
                    chunks.append(chunk)
        return chunks

    @torch.no_grad()
    def _encode(self, documents: Sequence[ReadDocument]) -> list[ChunkCache]:
        texts = [self.with_features(document) for document in documents]
        prefix = Tokens.text(self.prefix, self.axes)
        prefixed = [Tokens.side_by_side([prefix, text]) for text in texts]
        cache = RowCache(self.row_model, self.cache_shape(len(texts), len(prefixed[0])))
        with capture_unrotated_keys() as captured:
            cache.encode(prefixed)
        keys = torch.stack([torch.cat(captured[layer], dim=2) for layer in range(len(cache.keys))], dim=1)
        values = cache.values.transpose(0, 1)  # [documents, layers, groups, rows, dim]
        return [
            ChunkCache.of(text, key, value, document.images, dict(self.fingerprint))
            for document, text, key, value in zip(documents, texts, keys, values, strict=True)
        ]

    def compose(self, chunks: Sequence[ChunkCache]) -> Context:
        """Compose a context of these chunks, in order, after one prefix. The same chunk may occur twice.

        Raises:
            ValueError: If there are no chunks, one is from another model, or together they exceed the model's context.
        """
        if not chunks:
            raise ValueError("a context needs at least one chunk")
        for i, chunk in enumerate(chunks):
            check_fingerprint(f"chunk {i}", chunk.fingerprint, self.fingerprint)
        chunks = [replace(chunk, holder=self._holder(i, chunk)) for i, chunk in enumerate(chunks)]
        rows = len(self.prefix) + sum(len(chunk.ids) for chunk in chunks)
        self.check_length(rows, f"{len(chunks)} chunks with their prefix", "compose fewer")
        return Context(self, chunks)
