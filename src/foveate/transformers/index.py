"""Documents and their cached chunks in a folder: encoded once, read on demand."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from math import inf
from pathlib import Path
from random import Random
from threading import Lock
from time import time
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128

from foveate.transformers.chunk import ChunkCache, differences
from foveate.transformers.documents import Passage, split_documents
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.fingerprint import digest
from foveate.transformers.folder import Folder
from foveate.transformers.model import ReadDocument
from foveate.transformers.stored_documents import (
    DOCUMENT,
    Document,
    description,
    document_file,
    read_index,
    remove_documents,
)
from foveate.utils.progress import Track, silent

__all__ = ["WORDS", "BuildReport", "ChunkIndex", "index_documents"]

logger = logging.getLogger(__name__)

ABANDONED = 3600
"""Age in seconds from which an incomplete file counts as abandoned."""
EIGHT_BIT = "-int8.safetensors"
CHUNK = re.compile(r"[0-9a-f]{32}(-int8)?\.safetensors")
WORDS = re.compile(r"words-[0-9a-f]{32}\.zip")
"""Files that keep the words of all passages, see `foveate.transformers.retrieval.bm25`."""
INCOMPLETE = re.compile(rf"({CHUNK.pattern}|{DOCUMENT.pattern}|{WORDS.pattern})\.[0-9a-f]{{32}}\.part")


class BuildReport(NamedTuple):
    """Result of `ChunkIndex.build`.

    Attributes:
        encoded: Number of chunks encoded by this process.
        found: Number of chunks that existed already or were encoded by another process. Files that have lost their end
            are encoded again; other damage is found when a chunk is loaded.
        removed: Number of removed files, whose passages no longer exist.
        left: Number of chunks that did not fit into `max_disk` or on the disk. Each is encoded when it is loaded.
    """

    encoded: int
    found: int
    removed: int
    left: int


class ChunkIndex:
    """Documents, split into passages, and the cached chunk of each passage.

    The folder has a JSON file for each document, with its passages and their tokens, and a safetensors file for each
    chunk, named by a hash of the model and the passage's tokens. An index belongs to one model and prefix. Documents
    stay until they are removed. Chunks are a cache: a missing or damaged chunk is encoded again when it is loaded.
    Hence any number of processes may use and change a folder at a time, and a process may be killed at any time. What
    cannot be written, because a disk is full or read-only, stays in memory. Other files in the folder are left alone.

    Passage numbers do not change, so that threads can use an index while documents are added or removed: `add` and
    `remove` return another index.

    Examples:
        >>> index = ChunkIndex("s3://bucket/lighthouses", encoder)
        >>> index = index.add({"keepers.txt": "Its keeper was Ada Brown."})
        >>> index.build()
        >>> context = encoder.compose(index.load([0]))

    Args:
        place: Local folder, or a URL that fsspec knows, such as s3://bucket/folder.
        encoder: Encoder of the passages.
        max_disk: Largest size of all chunks in bytes. The least recently used chunks are removed to make room; on file
            systems without access times (S3), the oldest.
        max_memory: Largest size in bytes of the chunks that stay in memory for later calls of `load`; the chunks of
            the last call always stay.
        date: Date of the encoder's prefix, if a chat template tells it; see `chat_frame`.
        force: Whether to take over an index of another model: its passages are tokenized and encoded again.

    Attributes:
        made: What the index was made with: "model", its name; "date"; and the encoder's fingerprint.
        documents: Hash of the text and the settings of each document, by name.
        passages: Passages of all documents, by the documents' names.
        ids: Token ids of each passage.
        skipped: Reasons why documents have no passages.
        refused: Reasons why chunks were encoded again.
        unsaved: Reason why something is only in memory, which is also logged. Empty if the folder can be written.

    Raises:
        ValueError: If the index was made with another model or prefix.
    """

    def __init__(
        self,
        place: str | Path,
        encoder: ChunkEncoder,
        *,
        max_disk: float = inf,
        max_memory: float = 0,
        date: str = "",
        force: bool = False,
    ) -> None:
        self.place, self.encoder, self.max_disk, self.max_memory = place, encoder, max_disk, max_memory
        self.made = {"model": encoder.name, "date": date, **encoder.fingerprint}
        self.refused: list[str] = []
        self.unsaved: list[str] = []
        self._unsaved_documents: dict[str, Document | None] = {}  # by name; None is removed
        self._folder, self._fingerprint = Folder(place), digest(encoder.fingerprint)
        self._loaded: dict[str, ChunkCache] = {}  # least recently used first
        self._growing = Lock()
        self.passages: list[Passage] = []
        self.ids: list[list[int]] = []
        if force:
            for document in read_index(self._folder, []):
                if self._differs(document):
                    eight_bit = any(file.endswith(EIGHT_BIT) for file in document.files)
                    self._put(document.name, self._document(document.name, "", document.passages, eight_bit))
        self._read_documents()

    # --- documents ---------------------------------------------------------------------------------------------------

    def add(
        self,
        documents: Mapping[str, str | bytes],
        max_tokens: int | None = None,
        eight_bit: bool = False,
        track: Track = silent,
    ) -> "ChunkIndex":
        """Add documents, replacing documents of the same names; call `build` to encode them.

        Returns this index if nothing has changed, else a new one. It lists in `skipped` the documents that the model
        cannot take.

        Args:
            documents: Texts by name, and, for a vision-language model, contents of image files.
            max_tokens: Largest number of tokens in a passage. 0 keeps documents whole; None is 512, or a quarter of
                the model's context if smaller.
            eight_bit: Whether to store keys and values as 8-bit integers.
            track: Progress bar.
        """
        if max_tokens is None:
            max_tokens = self.encoder.passage_tokens
        if not self._folder.files():
            self._save(".gitignore", b"*\n")
        texts = {
            name: text if isinstance(text, str) else xxh3_128(text).hexdigest() for name, text in documents.items()
        }
        sources = {name: digest([text, max_tokens, eight_bit, self._fingerprint]) for name, text in texts.items()}
        changed = [name for name, source in sources.items() if self.documents.get(name) != source]
        advance = track("splitting documents", len(changed)) if changed else lambda: None
        for name in changed:
            passages = split_documents({name: documents[name]}, max_tokens, self.encoder.spans)
            self._put(name, self._document(name, sources[name], passages, eight_bit))
            advance()
        return self.refresh() if changed else self

    def remove(self, names: Iterable[str]) -> "ChunkIndex":
        """Remove documents and their chunks; see `remove_documents`. Returns the new index."""
        remove_documents(self.place, names)
        return self.refresh()

    def refresh(self) -> "ChunkIndex":
        """The index with the current documents of the folder. Chunks stay in memory."""
        new = copy(self)
        new._read_documents()
        return new

    @property
    def changed(self) -> bool:
        """Whether documents in the folder have changed since they were read; `refresh` reads them again."""
        return self._folder.stamp(DOCUMENT) != self._stamp

    def _read_documents(self) -> None:
        self._stamp = self._folder.stamp(DOCUMENT)
        self.documents: dict[str, str] = {}
        self.passages, self.ids, self.skipped = [], [], list[str]()
        self._files: list[str] = []  # chunk of each passage; passages with equal tokens share one
        found = {document.name: document for document in read_index(self._folder, self.skipped)}
        found |= self._unsaved_documents
        for document in (document for _, document in sorted(found.items()) if document):
            if names := self._differs(document):
                raise ValueError(
                    f"{self.place} was made with another {', '.join(names)} ({description(document.made)}): name the "
                    "model and prefix that it was made with, or another index, or force it to be encoded anew"
                )
            self.made = document.made  # with the date of the first
            self.documents[document.name] = document.source
            try:
                if not document.passages:
                    raise ValueError(f"{document.name} has no text: leave it out")
                for passage, ids in zip(document.passages, document.ids, strict=True):
                    self._check(passage, ids)
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                self.passages += document.passages
                self.ids += document.ids
                self._files += document.files

    def _differs(self, document: Document) -> list[str]:
        return differences(document.made, self.encoder.fingerprint)

    def _document(self, name: str, source: str, passages: list[Passage], eight_bit: bool) -> Document:
        read = [self.encoder.read(passage.content) for passage in passages]
        ids, files = [each.ids.tolist() for each in read], [self._file(each, eight_bit) for each in read]
        return Document(name, source, self.made, passages, ids, files)

    def _put(self, name: str, document: Document | None) -> None:
        """Write the file of a document, or remove it."""
        file = document_file(name)
        if self._save(file, document.to_bytes()) if document else self._remove(file):
            self._unsaved_documents.pop(name, None)
        else:
            self._unsaved_documents[name] = document

    def number(self, passage: Passage) -> int:
        """Number of the passage with the same tokens, added to the passages if there is none.

        An added passage belongs to no document. Its chunk is encoded when it is first loaded, and kept until the next
        `build` of an index without it.

        Raises:
            ValueError: If the passage has no tokens, or is longer than the model's context.
        """
        read = self.encoder.read(passage.text)
        ids = read.ids.tolist()
        self._check(passage, ids)
        with self._growing:
            if ids not in self.ids:
                self._files.append(self._file(read))
                self.ids.append(ids)
                self.passages.append(passage)
            return self.ids.index(ids)

    def _check(self, passage: Passage, ids: list[int]) -> None:
        if not ids:
            raise ValueError(f"{passage.name} has no tokens: leave it out")
        self.encoder.check_length(len(self.encoder.prefix) + len(ids), f"{passage.name} with its prefix", "split it")

    def _file(self, read: ReadDocument, eight_bit: bool = False) -> str:
        return digest([self._fingerprint, read.ids.tolist(), *read.images]) + (
            EIGHT_BIT if eight_bit else ".safetensors"
        )

    # --- chunks ------------------------------------------------------------------------------------------------------

    def build(self, track: Track = silent) -> BuildReport:
        """Encode the missing chunks, and remove files of passages that no longer exist.

        After an interruption, call `build` again: only the passage being encoded is lost. Processes that build at the
        same time share the work, each in a different order.

        Args:
            track: Progress bar.
        """
        files = self._folder.files()
        numbers = {file: passage for passage, file in enumerate(self._files)}
        # documents are written before their chunks, so that every chunk listed above has its document below
        used = numbers.keys() | {file for document in read_index(self._folder, []) for file in document.files}
        unused = [file for file in files if CHUNK.fullmatch(file) and file not in used]
        young = time() - ABANDONED
        halves = [file for file in files if INCOMPLETE.fullmatch(file) and self._folder.used(file) < young]
        halves += [file for file, passage in numbers.items() if files.get(file, inf) < self._least_bytes(passage)]
        for file in unused + halves:
            self._remove(file)
        self._make_room(0)
        files = self._folder.files()
        missing = [file for file in numbers if file not in files]
        Random().shuffle(missing)
        encoded = left = 0
        advance = track("encoding passages", len(missing)) if missing else lambda: None
        for i, file in enumerate(missing):
            if not self._folder.exists(file):  # else another process was faster
                if not self._write(file, self._encode(numbers[file]).to_bytes()):
                    left = sum(not self._folder.exists(other) for other in missing[i:])
                    break
                encoded += 1
            advance()
        self._make_room(0)  # several processes may have used the same room
        return BuildReport(encoded, len(numbers) - encoded - left, len(unused), left)

    def _least_bytes(self, passage: int) -> int:
        """Size of the tensors of a passage's chunk: a smaller file has lost its end."""
        tokens, eight_bit = len(self.ids[passage]), self._files[passage].endswith(EIGHT_BIT)
        layers, _, groups, rows, dim = self.encoder.cache_shape(1, len(self.encoder.prefix) + tokens)
        row = 2 * layers * groups * dim
        return 8 * tokens + row * (rows + 4 if eight_bit else rows * self.encoder.dtype.itemsize)

    def load(self, passages: Sequence[int]) -> list[ChunkCache]:
        """Load the chunks of passages. Missing or damaged chunks are encoded again.

        If several processes divide a context, each loads the chunks that it keeps.
        """
        before = self._loaded  # other threads may load other passages meanwhile
        here = {self._files[passage]: passage for i, passage in enumerate(passages) if self.encoder.keeps(i)}
        used = {file: before.get(file) or self._read(passage) for file, passage in here.items()}
        kept = {file: chunk for file, chunk in before.items() if file not in used} | used
        size = sum(chunk.nbytes for chunk in kept.values())
        for file in [file for file in kept if file not in used]:
            if size > self.max_memory:
                size -= kept.pop(file).nbytes
        for file in used:
            self._folder.touch(file)
        self._loaded = kept
        return [
            self.encoder.share(i, used.get(self._files[passage]), torch.tensor(self.ids[passage]))
            for i, passage in enumerate(passages)
        ]

    @property
    def nbytes(self) -> int:
        """Size of the chunks in the folder in bytes."""
        return sum(self._chunks().values())

    def _chunks(self) -> dict[str, int]:
        return {file: size for file, size in self._folder.files().items() if CHUNK.fullmatch(file)}

    def _read(self, passage: int) -> ChunkCache:
        try:
            with self._folder.opened(self._files[passage]) as path:
                return ChunkCache.load(path, self.encoder, self._content(passage))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self.refused.append(str(error))
        chunk = self._encode(passage)
        content = chunk.to_bytes()
        self._make_room(len(content))
        self._write(self._files[passage], content)
        return chunk

    def _content(self, passage: int) -> Any:
        return self.passages[passage].content if self.passages[passage].image else self.ids[passage]

    def _encode(self, passage: int) -> ChunkCache:
        (chunk,) = self.encoder.encode_read([self.encoder.read(self._content(passage))])
        return chunk.quantized() if self._files[passage].endswith(EIGHT_BIT) else chunk

    def _write(self, file: str, content: bytes) -> bool:
        """Write the file of a chunk if there is room for it. Returns whether it was written."""
        room = self.max_disk == inf or self.nbytes + len(content) <= self.max_disk
        return room and self._save(file, content)

    def _save(self, file: str, content: bytes) -> bool:
        return self._try(lambda: self._folder.write(file, content))

    def _remove(self, file: str) -> bool:
        return self._try(lambda: self._folder.remove(file))

    def _try(self, change: Callable[[], None]) -> bool:
        """Change the folder if it can be written. Returns whether it was changed."""
        try:
            change()
        except OSError as error:  # a full or read-only disk
            if not self.unsaved:
                reason = f"{self.place} cannot be written ({error.strerror or error}): what is new stays in memory"
                self.unsaved.append(reason)
                logger.warning(reason)
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Remove chunks, least recently used first, until a chunk of this size in bytes fits, if possible."""
        if self.max_disk == inf or size > self.max_disk:
            return
        chunks = self._chunks()
        excess = sum(chunks.values()) + size - self.max_disk
        for file in sorted(chunks, key=self._folder.used) if excess > 0 else ():
            if excess > 0:
                self._remove(file)
                excess -= chunks[file]


def index_documents(
    place: str | Path,
    encoder: ChunkEncoder,
    documents: Mapping[str, str | bytes],
    max_tokens: int | None = None,
    eight_bit: bool = False,
    *,
    max_disk: float = inf,
    max_memory: float = 0,
    date: str = "",
    force: bool = False,
    track: Track = silent,
) -> ChunkIndex:
    """An index of exactly these documents; other documents are removed from its folder. Call `build` to encode them.

    See `ChunkIndex` and `ChunkIndex.add` for the arguments.
    """
    index = ChunkIndex(place, encoder, max_disk=max_disk, max_memory=max_memory, date=date, force=force)
    index = index.add(documents, max_tokens, eight_bit, track)
    for name in (gone := index.documents.keys() - documents.keys()):
        index._put(name, None)
    return index.refresh() if gone else index
