"""Documents of an index in its folder. Reading and removing them needs no model."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from foveate.transformers.documents import Passage
from foveate.transformers.fingerprint import digest
from foveate.transformers.folder import Folder
from foveate.utils.files import slug

__all__ = [
    "DOCUMENT",
    "Document",
    "date_of",
    "description",
    "document_file",
    "first_document",
    "index_folder",
    "read_index",
    "remove_documents",
]

DOCUMENT = re.compile(r".+-[0-9a-f]{32}\.json")


class Document(NamedTuple):
    """A document in an index.

    Attributes:
        name: Name of the document.
        source: Hash of the text, the model, and the settings of `ChunkIndex.add`.
        made: What the index was made with: "model", its name; "date", see `chat_frame`; and the fingerprint.
        passages: Passages of the document.
        ids: Token ids of each passage.
        files: Chunk files of the passages.
    """

    name: str
    source: str
    made: dict[str, str]
    passages: list[Passage]
    ids: list[list[int]]
    files: list[str]

    def to_bytes(self) -> bytes:
        """Content of the document's file: a line of JSON, and a hash of it."""
        line = json.dumps(self, ensure_ascii=False).encode()
        return line + b"\n" + xxh3_128(line).hexdigest().encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Document":
        """Read a document from the content of its file.

        Raises:
            ValueError: If the content is damaged.
        """
        line, _, kept = content.rpartition(b"\n")
        if xxh3_128(line).hexdigest().encode() != kept:
            raise ValueError("the content is damaged")
        name, source, made, passages, ids, files = json.loads(line)
        return cls(name, source, made, [Passage(*passage) for passage in passages], ids, files)


def description(made: Mapping[str, str]) -> str:
    """Name, dtype and date of the model that an index was made with."""
    return ", ".join(filter(None, (made["model"], made["dtype"].removeprefix("torch."), made["date"])))


def document_file(name: str) -> str:
    """File of a document in the folder of an index."""
    return f"{slug(name)}-{digest(name)}.json"


def read_index(place: Folder | str | Path, damaged: list[str]) -> list[Document]:
    """Documents of an index, by name.

    Args:
        place: Folder or URL of the index.
        damaged: List that receives the reasons why documents are left out.
    """
    return sorted(_read(place, damaged), key=lambda document: document.name)


def first_document(place: str | Path) -> Document | None:
    """Any document of an index; None if it has none."""
    return next(_read(place, []), None)


def _read(place: Folder | str | Path, damaged: list[str]) -> Iterator[Document]:
    folder = place if isinstance(place, Folder) else Folder(place)
    for file in filter(DOCUMENT.fullmatch, folder.files()):
        try:
            yield Document.from_bytes(folder.read(file))
        except FileNotFoundError:  # another process has just removed it
            pass
        except ValueError:
            damaged.append(f"{file} in {folder.root} is damaged: add its document again, or delete the file")


def date_of(*places: str | Path) -> str:
    """ISO date on which the first of these indexes was made that exists; else today's, the same in all time zones."""
    dates = (document.made["date"] for document in map(first_document, places) if document)
    return next(dates, datetime.now(UTC).date().isoformat())


def remove_documents(place: str | Path, names: Iterable[str]) -> None:
    """Remove documents and their chunks from an index. This needs no model.

    Raises:
        ValueError: If a document does not exist; then nothing is removed.
    """
    folder, names = Folder(place), set(names)
    documents, files = read_index(folder, []), folder.files()
    if unknown := sorted(name for name in names if document_file(name) not in files):
        raise ValueError(
            f"{place} has no document {unknown[0]}: it has {', '.join(each.name for each in documents) or 'none'}"
        )
    for name in names:
        folder.remove(document_file(name))
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
