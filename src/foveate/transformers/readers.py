# pyright: basic, reportMissingImports=false
"""Texts of the documents in a folder: text, code, HTML, PDF, Word and CSV files."""

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from foveate.transformers.documents import opened_image

__all__ = ["PICTURES", "SUFFIXES", "describe_ignored", "read_documents"]

PLAIN = (
    ".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".log", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini",
    ".cfg", ".xml", ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cu", ".cs", ".go", ".rs", ".rb", ".php", ".pl", ".swift", ".lua", ".r", ".jl", ".sh", ".bat", ".sql",
    ".css",
)  # fmt: skip
"""Suffixes of files that are read as they are."""
PACKAGES = {".html": "markdownify", ".htm": "markdownify", ".pdf": "pypdf", ".docx": "docx"}
"""Package of the extra `documents` that reads a type of files, by suffix."""
PICTURES = ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"
"""Suffixes of images, for models that see."""
SUFFIXES = *PLAIN, ".csv", ".tsv", *PACKAGES


def read_documents(
    folder: Path, skipped: list[str] | None = None, ignored: Counter[str] | None = None, pictures: bool = False
) -> dict[str, Any]:
    """Texts of all files with one of the `SUFFIXES` in a folder and its subfolders, by path.

    With `pictures`, also the contents of files with one of the suffixes `PICTURES`, as bytes.

    Hidden files are left out, and subfolders that git ignores as a whole, such as indexes: their .gitignore is `*`.

    Args:
        folder: Path of a folder, or of a single file.
        skipped: List that receives the reasons for skipped files: they are empty, damaged, not UTF-8, unreadable, or
            links to outside of the folder. None raises an error that names all of them.
        ignored: Counter that receives the number of the other files, by type.
        pictures: Whether to read pictures.

    Raises:
        ValueError: If the folder does not exist or has no document, or none of them can be read.
        ImportError: If the folder is a single file, of a type whose package is not installed.
    """
    bad: list[str] = []
    others: Counter[str] = Counter()
    if folder.is_file():
        found = {folder.as_posix(): folder}
    elif folder.is_dir():
        found: dict[str, Path] = {}
        for path in sorted(_files(folder, bad)):
            if other := _other_type(path.suffix.lower(), pictures):
                others[other] += 1
            else:
                found[path.relative_to(folder).as_posix()] = path
    else:
        raise ValueError(f"{folder} is not a folder: name one with documents")
    documents: dict[str, str | bytes] = {}
    for name, path in found.items():
        try:
            text = READERS.get(path.suffix.lower(), _plain)(path)
        except ImportError:
            raise
        except UnicodeDecodeError:
            bad.append(f"{path} is not UTF-8 text: save it as UTF-8, or move it away")
        except OSError as error:
            bad.append(f"{path} cannot be read ({error.strerror or error}): make it readable, or move it away")
        except Exception as error:  # a damaged file may make its reader raise anything
            bad.append(f"{path} cannot be read ({str(error) or type(error).__name__}): save it again, or move it away")
        else:
            if text.strip():
                documents[name] = text
            else:
                bad.append(f"{path} is empty: write text into it (scanned pages have none), or move it away")
    if bad and (skipped is None or not documents):
        raise ValueError("; ".join(bad))
    if not documents:
        reason = "; ".join(filter(None, ["name a folder that has some", describe_ignored(others)]))
        raise ValueError(f"{folder} has no .txt, .md, .html, .pdf or other text files: {reason}")
    if skipped is not None:
        skipped += bad
    if ignored is not None:
        ignored += others
    return documents


def describe_ignored(ignored: Counter[str]) -> str:
    """A line about ignored files, such as "ignored 3 files: 2 .png, 1 .zip". Empty if there are none."""
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(ignored.items()))
    return f"ignored {ignored.total()} files: {types}" if ignored else ""


def _other_type(suffix: str, pictures: bool) -> str:
    """Type of files that are ignored, for `describe_ignored`; empty for documents."""
    if suffix not in (*SUFFIXES, *(PICTURES if pictures else ())):
        return suffix or "without a suffix"
    missing = suffix in PACKAGES and find_spec(PACKAGES[suffix]) is None
    return f"{suffix} (pip install 'foveate[documents]')" if missing else ""


def _files(folder: Path, bad: list[str]) -> Iterator[Path]:
    """Files of a folder that are not hidden; `bad` receives the reasons for what cannot be read."""
    inside = os.path.realpath(folder)

    def unreadable(error: OSError) -> None:
        bad.append(f"{error.filename} cannot be read ({error.strerror}): make it readable, or move it away")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_ignored(Path(place, name))]
        for path in (Path(place, name) for name in (*files, *folders) if not name.startswith(".")):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                bad.append(f"{path} links to outside of {folder}: copy it into the folder, or remove the link")
            elif path.is_file():
                yield path
            elif not path.is_dir():
                bad.append(f"{path} is no file, or a link to nothing: move it away")


def _is_ignored(folder: Path) -> bool:
    try:
        return (folder / ".gitignore").read_bytes().strip() == b"*"
    except OSError:
        return False


def _plain(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _picture(path: Path) -> bytes:
    opened_image(content := path.read_bytes())
    return content


def _csv(path: Path) -> str:
    """A paragraph for each row, with the name of its column before each value."""
    text = _plain(path)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    names, *rows = list(csv.reader(StringIO(text, newline=""), delimiter=separator)) or [[]]
    paragraphs = (
        "\n".join(f"{name}: {value}" for name, value in zip_longest(names, row, fillvalue="") if value) for row in rows
    )
    return "\n\n".join(paragraphs) if rows else text


def _html(path: Path) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    soup = BeautifulSoup(path.read_bytes(), "lxml")
    for hidden in soup(["script", "style", "template", "noscript", "svg"]):
        hidden.decompose()
    if soup.title:
        soup.title.name = "p"
    writer = MarkdownConverter(
        strip=["a", "img"], heading_style="atx", escape_asterisks=False, escape_underscores=False
    )
    return writer.convert_soup(soup)


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)


def _docx(path: Path) -> str:
    from docx import Document
    from docx.table import Table

    blocks = Document(str(path)).iter_inner_content()
    return "\n\n".join(
        "\n".join(" | ".join(cell.text for cell in row.cells) for row in block.rows)
        if isinstance(block, Table)
        else block.text
        for block in blocks
    )


READERS: dict[str, Callable[[Path], str | bytes]] = {
    **dict.fromkeys(PICTURES, _picture),
    ".csv": _csv, ".tsv": _csv, ".html": _html, ".htm": _html, ".pdf": _pdf, ".docx": _docx,
}  # fmt: skip
"""Readers by suffix; other files are read as they are."""
