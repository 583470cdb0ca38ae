"""Folder of an index, local or on any file system supported by fsspec."""

import os
import re
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
    """A folder shared by processes, possibly on several hosts. Files appear only when they are complete.

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
        except Exception as error:  # from the storage library: no credentials, no connection
            raise OSError(f"cannot read {self.fs.unstrip_protocol(self.root)}: {error}") from error
        return {info["name"].rpartition("/")[2]: info["size"] for info in found if info["type"] == "file"}

    def stamp(self, names: re.Pattern[str]) -> set[object]:
        """A value that changes whenever a file with a name of this pattern is added, replaced or removed."""
        with suppress(FileNotFoundError):
            if self._is_local:
                with os.scandir(self.root) as found:
                    return {(file.name, file.stat().st_mtime_ns) for file in found if names.fullmatch(file.name)}
            found = self.fs.ls(self.root, detail=True)
            return {str(info) for info in found if names.fullmatch(info["name"].rpartition("/")[2])}
        return set()

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self.fs.exists(self._path(name))

    def read(self, name: str) -> bytes:
        """Content of a file."""
        return self.fs.cat_file(self._path(name))

    @contextmanager
    def opened(self, name: str) -> Generator[Path]:
        """Context manager that yields a local path of a file. Tensors that map it stay valid afterwards."""
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
            self.fs.pipe_file(self._path(name), content)  # object stores show only complete objects

    def remove(self, name: str) -> None:
        """Remove a file; no error if another process has removed it."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def touch(self, name: str) -> None:
        """Update the access time of a file; only local file systems keep one."""
        if self._is_local:
            with suppress(OSError):  # removed, or not ours
                os.utime(self._path(name))

    def used(self, name: str) -> float:
        """Access time of a file in seconds; its change time if there is no access time; 0 if it is gone."""
        try:
            modified: datetime = self.fs.modified(self._path(name))
        except FileNotFoundError:
            return 0.0
        return modified.timestamp()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"
