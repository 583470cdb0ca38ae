"""Documents and their cached chunks in a folder: encoded once, read on demand."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf
from pathlib import Path
from random import Random
from threading import Lock
from time import time
from typing import NamedTuple

from foveate.transformers.chunk import ChunkCache
from foveate.transformers.documents import Passage, split_documents
from foveate.transformers.encoder import ChunkEncoder
from foveate.transformers.fingerprint import digest
from foveate.transformers.folder import Folder
from foveate.utils.files import slug
from foveate.utils.progress import Track, silent

__all__ = [
    "BuildReport",
    "ChunkIndex",
    "Document",
    "index_documents",
    "index_folder",
    "read_index",
    "remove_documents",
]

ABANDONED = 3600
"""Age in seconds from which an incomplete file counts as abandoned."""
EIGHT_BIT = "-int8.safetensors"
CHUNK = re.compile(r"[0-9a-f]{32}(-int8)?\.safetensors")
DOCUMENT = re.compile(r".+-[0-9a-f]{32}\.json")
INCOMPLETE = re.compile(rf"({CHUNK.pattern}|{DOCUMENT.pattern})\.[0-9a-f]{{32}}\.part")


class BuildReport(NamedTuple):
    """Result of `ChunkIndex.build`.

    Attributes:
        encoded: Number of chunks encoded by this process.
        found: Number of chunks that existed already or were encoded by another process.
        removed: Number of removed files, whose passages no longer exist.
        left: Number of chunks that did not fit into `max_disk`. Each is encoded when it is loaded.
    """

    encoded: int
    found: int
    removed: int
    left: int


class Document(NamedTuple):
    """A document in an index.

    Attributes:
        name: Name of the document.
        source: Hash of the text, the model, and the settings of `add`.
        passages: Passages of the document.
        files: Chunk files of the passages.
    """

    name: str
    source: str
    passages: list[Passage]
    files: list[str]

    def to_bytes(self) -> bytes:
        """Content of the document's file."""
        return json.dumps([*self, digest(self)], ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Document":
        """Read a document from the content of its file.

        Raises:
            ValueError: If the content is damaged.
        """
        found = json.loads(content)
        if not isinstance(found, list) or not found or digest(found[:-1]) != found[-1]:
            raise ValueError("the content is damaged")
        name, source, passages, files = found[:-1]
        return cls(name, source, [Passage(*passage) for passage in passages], files)


class ChunkIndex:
    """Documents, split into passages, and the cached chunk of each passage.

    The folder has a JSON file for each document, and a safetensors file for each chunk, named by a hash of the model
    and the passage's tokens. Documents stay until they are removed. Chunks are a cache: a missing or damaged chunk is
    encoded again when it is loaded. Hence any number of processes may use and change a folder at a time, and a process
    may be killed at any time. Other files in the folder are left alone.

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

    Attributes:
        documents: Hash of the text and the settings of each document, by name.
        passages: Passages of all documents, by the documents' names.
        ids: Token ids of each passage.
        skipped: Reasons why documents have no passages.
        refused: Reasons why chunks were encoded again.
    """

    def __init__(
        self, place: str | Path, encoder: ChunkEncoder, *, max_disk: float = inf, max_memory: float = 0
    ) -> None:
        self.place, self.encoder, self.max_disk, self.max_memory = place, encoder, max_disk, max_memory
        self.refused: list[str] = []
        self._folder, self._fingerprint = Folder(place), digest(encoder.fingerprint)
        self._loaded: dict[str, ChunkCache] = {}  # least recently used first
        self._growing = Lock()
        self.passages: list[Passage] = []
        self.ids: list[list[int]] = []
        self._read_documents()

    # --- documents ---------------------------------------------------------------------------------------------------

    def add(
        self,
        documents: Mapping[str, str],
        max_tokens: int | None = None,
        eight_bit: bool = False,
        track: Track = silent,
    ) -> "ChunkIndex":
        """Add documents, replacing documents of the same names; call `build` to encode them.

        The new index lists in `skipped` the documents that the model cannot take.

        Args:
            documents: Texts by name.
            max_tokens: Largest number of tokens in a passage. 0 keeps documents whole; None is 512, or a quarter of
                the model's context if smaller.
            eight_bit: Whether to store keys and values as 8-bit integers.
            track: Progress bar.
        """
        if max_tokens is None:
            max_tokens = self.encoder.passage_tokens
        if not self._folder.files():
            self._folder.write(".gitignore", b"*\n")
        sources = {name: digest([text, max_tokens, eight_bit, self._fingerprint]) for name, text in documents.items()}
        changed = [name for name, source in sources.items() if self.documents.get(name) != source]
        advance = track("splitting documents", len(changed)) if changed else lambda: None
        for name in changed:
            passages = split_documents({name: documents[name]}, max_tokens, self.encoder.count)
            files = [self._file(self.encoder.tokens(passage.text).tolist(), eight_bit) for passage in passages]
            self._folder.write(_file_of(name), Document(name, sources[name], passages, files).to_bytes())
            advance()
        return self.refresh()

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
        """Whether the folder has changed since the documents were read; `refresh` reads them again."""
        return self._folder.stamp() != self._stamp

    def _read_documents(self) -> None:
        self._stamp = self._folder.stamp()
        known = {passage.text: ids for passage, ids in zip(self.passages, self.ids, strict=True)}
        self.documents: dict[str, str] = {}
        self.passages, self.ids, self.skipped = [], [], list[str]()
        self._files: list[str] = []  # chunk of each passage; passages with equal tokens share one
        for document in read_index(self._folder, self.skipped):
            self.documents[document.name] = document.source
            try:
                if not document.passages:
                    raise ValueError(f"{document.name} has no text: leave it out")
                ids = [known.get(passage.text) or self._tokens(passage) for passage in document.passages]
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                self.passages += document.passages
                self.ids += ids
                eight_bit = any(file.endswith(EIGHT_BIT) for file in document.files)
                self._files += [self._file(each, eight_bit) for each in ids]

    def number(self, passage: Passage) -> int:
        """Number of the passage with the same tokens, added to the passages if there is none.

        An added passage belongs to no document. Its chunk is encoded when it is first loaded, and kept until the next
        `build` of an index without it.

        Raises:
            ValueError: If the passage has no tokens, or is longer than the model's context.
        """
        ids = self._tokens(passage)
        with self._growing:
            if ids not in self.ids:
                self._files.append(self._file(ids))
                self.ids.append(ids)
                self.passages.append(passage)
            return self.ids.index(ids)

    def _tokens(self, passage: Passage) -> list[int]:
        if not (ids := self.encoder.tokens(passage.text).tolist()):
            raise ValueError(f"{passage.name} has no tokens: leave it out")
        self.encoder.check_length(len(self.encoder.prefix) + len(ids), f"{passage.name} with its prefix", "split it")
        return ids

    def _file(self, ids: list[int], eight_bit: bool = False) -> str:
        return digest([self._fingerprint, ids]) + (EIGHT_BIT if eight_bit else ".safetensors")

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
        for file in unused + halves:
            self._folder.remove(file)
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

    def load(self, passages: Sequence[int]) -> list[ChunkCache]:
        """Load the chunks of passages. Missing or damaged chunks are encoded again."""
        before = self._loaded  # other threads may load other passages meanwhile
        files = [self._files[passage] for passage in passages]
        used = {file: before.get(file) or self._read(passage) for file, passage in zip(files, passages, strict=True)}
        kept = {file: chunk for file, chunk in before.items() if file not in used} | used
        size = sum(chunk.nbytes for chunk in kept.values())
        for file in [file for file in kept if file not in used]:
            if size > self.max_memory:
                size -= kept.pop(file).nbytes
        for file in used:
            self._folder.touch(file)
        self._loaded = kept
        return [used[file] for file in files]

    @property
    def nbytes(self) -> int:
        """Size of the chunks in the folder in bytes."""
        return sum(self._chunks().values())

    def _chunks(self) -> dict[str, int]:
        return {file: size for file, size in self._folder.files().items() if CHUNK.fullmatch(file)}

    def _read(self, passage: int) -> ChunkCache:
        try:
            with self._folder.opened(self._files[passage]) as path:
                return ChunkCache.load(path, self.encoder, self.ids[passage])
        except FileNotFoundError:
            pass
        except ValueError as error:
            self.refused.append(str(error))
        chunk = self._encode(passage)
        content = chunk.to_bytes()
        self._make_room(len(content))
        self._write(self._files[passage], content)
        return chunk

    def _encode(self, passage: int) -> ChunkCache:
        (chunk,) = self.encoder.encode([self.ids[passage]])
        return chunk.quantized() if self._files[passage].endswith(EIGHT_BIT) else chunk

    def _write(self, file: str, content: bytes) -> bool:
        """Write the file of a chunk if there is room for it. Returns whether it was written."""
        if room := self.max_disk == inf or self.nbytes + len(content) <= self.max_disk:
            self._folder.write(file, content)
        return room

    def _make_room(self, size: int) -> None:
        """Remove chunks, least recently used first, until a chunk of this size in bytes fits, if possible."""
        if self.max_disk == inf or size > self.max_disk:
            return
        chunks = self._chunks()
        excess = sum(chunks.values()) + size - self.max_disk
        for file in sorted(chunks, key=self._folder.used) if excess > 0 else ():
            if excess > 0:
                self._folder.remove(file)
                excess -= chunks[file]


def _file_of(name: str) -> str:
    return f"{slug(name)}-{digest(name)}.json"


def read_index(place: Folder | str | Path, damaged: list[str]) -> list[Document]:
    """Documents of an index, by name.

    Args:
        place: Folder or URL of the index.
        damaged: List that receives the reasons why documents are left out.
    """
    folder = place if isinstance(place, Folder) else Folder(place)
    documents: list[Document] = []
    for file in filter(DOCUMENT.fullmatch, folder.files()):
        try:
            documents.append(Document.from_bytes(folder.read(file)))
        except FileNotFoundError:  # another process has just removed it
            pass
        except ValueError:
            damaged.append(f"{file} in {folder.root} is damaged: add its document again, or delete the file")
    return sorted(documents)


def remove_documents(place: str | Path, names: Iterable[str]) -> None:
    """Remove documents and their chunks from an index. This needs no model.

    Raises:
        ValueError: If a document does not exist; then nothing is removed.
    """
    folder, names = Folder(place), set(names)
    documents, files = read_index(folder, []), folder.files()
    if unknown := sorted(name for name in names if _file_of(name) not in files):
        raise ValueError(
            f"{place} has no document {unknown[0]}: it has {', '.join(each.name for each in documents) or 'none'}"
        )
    for name in names:
        folder.remove(_file_of(name))
    kept = {file for document in documents if document.name not in names for file in document.files}
    for file in {file for document in documents for file in document.files} - kept:
        folder.remove(file)


def index_folder(documents: Path, model: str) -> Path:
    """Folder of a model's index of a folder of documents. Models in different folders of equal name do not share it.

    Args:
        documents: Folder of documents.
        model: Folder or hub id; empty for the built-in reader.
    """
    path = Path(model).resolve()
    name = f"{slug(path.name)}-{digest(str(path) if path.exists() else model)[:8]}" if model else "built-in"
    return documents / ".foveate" / name


def index_documents(
    place: str | Path,
    encoder: ChunkEncoder,
    documents: Mapping[str, str],
    max_tokens: int | None = None,
    eight_bit: bool = False,
    *,
    max_disk: float = inf,
    max_memory: float = 0,
    track: Track = silent,
) -> ChunkIndex:
    """An index of exactly these documents; other documents are removed from its folder. Call `build` to encode them.

    See `ChunkIndex` and `ChunkIndex.add` for the arguments.
    """
    index = ChunkIndex(place, encoder, max_disk=max_disk, max_memory=max_memory)
    index = index.add(documents, max_tokens, eight_bit, track)
    for name in index.documents.keys() - documents.keys():
        index._folder.remove(_file_of(name))
    return index.refresh()
