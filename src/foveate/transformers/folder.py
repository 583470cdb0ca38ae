"""A folder of an index, on this machine or on any file system that fsspec knows."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from foveate.utils.files import write_whole

__all__ = ["Folder"]


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
        """Update the access time of a file; only local file systems keep one."""
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
