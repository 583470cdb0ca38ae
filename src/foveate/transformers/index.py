"""Cached chunks of passages in a folder: encoded once, read when they are needed."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import time
from typing import NamedTuple

from foveate.transformers.chunk import ChunkCache, open_chunk
from foveate.transformers.documents import Passage, split_documents
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.fingerprint import digest
from foveate.utils.files import slug
from foveate.utils.progress import Track, silent

__all__ = ["BuildReport", "ChunkIndex", "index_documents", "index_name"]

ABANDONED = 3600
"""Age in seconds after which an incomplete file is no longer being written."""


class BuildReport(NamedTuple):
    """What `ChunkIndex.build` has done.

    Attributes:
        encoded: Number of chunks that were encoded.
        found: Number of chunks that existed already.
        removed: Number of removed files, whose passages no longer exist.
    """

    encoded: int
    found: int
    removed: int


class ChunkIndex:
    """The cached chunks of passages, one safetensors file each, named by a hash of its tokens.

    Args:
        folder: Folder of the files. Other files in it are left alone.
        encoder: Encoder of the passages.
        passages: Passages, in order.

    Attributes:
        ids: Token ids of each passage.
        refused: Reasons why files could not be used, so that their chunks were encoded again.

    Raises:
        ValueError: If a passage has no tokens, or is longer than the model's context. Files stay unchanged.
    """

    def __init__(self, folder: Path, encoder: ChunkEncoder, passages: Sequence[Passage]) -> None:
        self.folder, self.encoder, self.passages = folder, encoder, list(passages)
        self.ids = [self._tokens(passage) for passage in passages]
        self.refused: list[str] = []
        self._loaded: dict[int, ChunkCache] = {}
        self._growing = Lock()

    def number(self, passage: Passage) -> int:
        """The number of the passage with the same tokens. If there is none, the passage is added.

        The chunk of an added passage is encoded when it is first loaded, and its file is kept until the next `build`
        of an index without it.

        Raises:
            ValueError: If the passage has no tokens, or is longer than the model's context.
        """
        ids = self._tokens(passage)
        with self._growing:
            if ids not in self.ids:
                self.passages.append(passage)
                self.ids.append(ids)
            return self.ids.index(ids)

    def path(self, passage: int) -> Path:
        """File of a passage. Passages with equal tokens share a file."""
        return self.folder / f"{digest(self.ids[passage])}.safetensors"

    def build(self, track: Track = silent) -> BuildReport:
        """Encode the missing chunks, then remove files of passages that no longer exist.

        Each file appears only when it is complete. After an interruption, call `build` again: only the passage that
        was being encoded is lost. Tensors of existing files are not read yet.

        Args:
            track: Progress bar.
        """
        missing: list[int] = []
        paths = {self.path(passage): passage for passage in range(len(self.passages))}
        for path, passage in paths.items():
            try:
                with open_chunk(path, self.encoder):
                    pass
            except FileNotFoundError:
                missing.append(passage)
            except ValueError as error:
                self.refused.append(str(error))
                missing.append(passage)
        if missing:
            advance = track("encoding passages", len(missing))
            for passage in missing:
                self._encode(passage)
                advance()
        unused = [path for path in self._files() if path not in paths]
        for path in unused:
            path.unlink(missing_ok=True)  # another process may remove it too
        self._remove_incomplete()
        return BuildReport(len(missing), len(paths) - len(missing), len(unused))

    def load(self, passages: Sequence[int]) -> list[ChunkCache]:
        """The chunks of these passages, which stay in memory until others are loaded.

        A file with damaged tensors is encoded again.
        """
        before = self._loaded  # other threads may load other passages meanwhile
        loaded = {passage: before.get(passage) or self._read(passage) for passage in passages}
        self._loaded = loaded
        return [loaded[passage] for passage in passages]

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes."""
        return sum(path.stat().st_size for path in self._files())

    def words(self, passage: int) -> list[str]:
        """The text of each token of a passage, including the whitespace before it.

        If a character consists of several tokens, the first one has its text and the others are empty.
        """
        tokenizer, text = self.encoder.tokenizer, self.passages[passage].text
        if not tokenizer.is_fast:
            return [tokenizer.decode([token]) for token in self.ids[passage]]
        words, done = list[str](), 0
        for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping:
            words.append(text[done:end])
            done = max(done, end)
        return words

    def _tokens(self, passage: Passage) -> list[int]:
        ids = self.encoder.tokens(passage.text).tolist()
        if not ids:
            raise ValueError(f"{passage.name} has no tokens: leave it out")
        self.encoder.check_length(len(self.encoder.prefix) + len(ids), f"{passage.name} with its prefix", "split it")
        return ids

    def _read(self, passage: int) -> ChunkCache:
        try:
            return ChunkCache.load(self.path(passage), self.encoder, self.passages[passage].text)
        except (ValueError, FileNotFoundError) as error:
            self.refused.append(str(error))
            return self._encode(passage)

    def _encode(self, passage: int) -> ChunkCache:
        (chunk,) = self.encoder.encode([self.ids[passage]])
        chunk.save(self.path(passage))
        return chunk

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if re.fullmatch("[0-9a-f]{32}", path.stem)]

    def _remove_incomplete(self) -> None:
        """Remove incomplete files of killed processes. Younger ones may still be being written."""
        for path in self.folder.glob("*.part"):
            with suppress(FileNotFoundError):
                if re.match(r"[0-9a-f]{32}\.safetensors\.", path.name) and path.stat().st_mtime < time() - ABANDONED:
                    path.unlink()


def index_name(model: str) -> str:
    """The folder name of a model's index, which models in folders of equal names do not share.

    Args:
        model: Folder or hub id; empty for the built-in reader.
    """
    path = Path(model).resolve()
    return f"{slug(path.name)}-{digest(str(path) if path.exists() else model)[:8]}" if model else "built-in"


def index_documents(
    folder: Path, encoder: ChunkEncoder, documents: Mapping[str, str], max_tokens: int | None = None
) -> ChunkIndex:
    """The index of documents that are split into passages. Call `build` to encode them.

    Args:
        folder: Folder of the index.
        encoder: Encoder of the passages.
        documents: Texts by name.
        max_tokens: Largest number of tokens in a passage. 0 keeps documents whole; None is 512, or a quarter of the
            model's context if that is less.

    Raises:
        ValueError: If a passage has no tokens, or is longer than the model's context.
    """
    if max_tokens is None:
        max_tokens = min(512, encoder.model.config.max_position_embeddings // 4)
    passages = split_documents(
        documents, max_tokens, lambda text: len(encoder.tokenizer(text, add_special_tokens=False).input_ids)
    )
    return ChunkIndex(folder, encoder, passages)
