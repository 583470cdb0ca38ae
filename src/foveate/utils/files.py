"""Results on disk: atomic writes, pictures that carry their settings, folders here or on another file system."""

import io
import json
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from PIL.PngImagePlugin import PngInfo

__all__ = ["Folder", "claim", "png", "slug", "write_picture", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name that is renamed when the file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")  # unique to this writer, on any host
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_picture(path: Path, image: Image.Image, settings: dict[str, str], more: Sequence[Image.Image] = ()) -> None:
    """Write a PNG that carries its settings, see `png`."""
    write_whole(path, png(image, settings, more))


def png(image: Image.Image, settings: dict[str, str], more: Sequence[Image.Image] = ()) -> bytes:
    """A PNG that carries its settings as text chunks (`Image.open(path).text` reads them).

    If there are more images, they follow the first as frames of an animated PNG.
    """
    chunks = PngInfo()
    for name, value in settings.items():
        chunks.add_itxt(name, value)
    file = io.BytesIO()
    image.save(file, format="png", pnginfo=chunks, save_all=bool(more), append_images=more)
    return file.getvalue()


def slug(text: str) -> str:
    """The text as a file name: lower-case words of any language and dashes, 60 characters at most."""
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:60] or "picture"


def claim(folder: Path, settings: dict[str, str]) -> None:
    """Reserve a folder for results with these settings, which are written to its settings.json.

    Raises:
        ValueError: If the folder holds results of other settings.
    """
    path = folder / "settings.json"
    before = json.loads(path.read_text()) if path.exists() else settings
    if differ := [f"{name}={before.get(name)}" for name in settings if before.get(name) != settings[name]]:
        raise ValueError(f"{folder} holds pictures drawn with {', '.join(differ)}: name another folder with --out")
    if not path.exists():
        write_whole(path, json.dumps(settings, indent=2).encode())


class Folder:
    """A folder that processes on several hosts may share. A file is there only when it is complete.

    Args:
        place: Local folder, or a URL that fsspec knows, such as s3://bucket/folder or memory://folder.
    """

    def __init__(self, place: str | Path) -> None:
        self.fs, self.root = url_to_fs(str(place), use_listings_cache=False)  # other processes change the folder
        self._is_local = isinstance(self.fs, LocalFileSystem)

    def files(self) -> dict[str, int]:
        """Sizes of the files in bytes, by name.

        Raises:
            OSError: If the file system cannot be reached.
        """
        try:
            found = self.fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:  # of the library behind it: no credentials, no connection
            raise OSError(f"cannot read {self.fs.unstrip_protocol(self.root)}: {error}") from error
        return {info["name"].rpartition("/")[2]: info["size"] for info in found if info["type"] == "file"}

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self.fs.exists(self._path(name))

    def read(self, name: str) -> bytes:
        """Content of a file."""
        return self.fs.cat_file(self._path(name))

    @contextmanager
    def opened(self, name: str) -> Generator[Path]:
        """Context that yields a local path of a file's content. Tensors that map it may be used afterwards."""
        if self._is_local:
            yield Path(self._path(name))
            return
        with TemporaryDirectory() as folder:
            self.fs.get_file(self._path(name), f"{folder}/{name}")
            yield Path(folder, name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        if self._is_local:
            write_whole(Path(self._path(name)), content)
        else:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._path(name), content)  # object stores show an object when they have all of it

    def remove(self, name: str) -> None:
        """Remove a file, unless another process has done so."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def touch(self, name: str) -> None:
        """Make now the time of the last use of a file. Only local files keep it."""
        if self._is_local:
            with suppress(OSError):  # removed, or not ours
                os.utime(self._path(name))

    def used(self, name: str) -> float:
        """Time of the last use of a file in seconds, of its last change where that is not kept, 0 if it is gone."""
        try:
            modified: datetime = self.fs.modified(self._path(name))
        except FileNotFoundError:
            return 0.0
        return modified.timestamp()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"
