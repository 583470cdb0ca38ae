"""Results on disk: atomic writes, file names, and folders that belong to one set of settings."""

import json
import os
import re
from pathlib import Path
from uuid import uuid4

__all__ = ["CLAIM", "claim", "slug", "write_whole"]

CLAIM = "settings.json"
"""Name of the file that `claim` writes."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name that is renamed when the file is complete.

    Raises:
        OSError: If it cannot be written; the error names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")  # unique to this writer, on any host
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk has no name
    finally:
        part.unlink(missing_ok=True)


def slug(text: str) -> str:
    """The text as a file name: lower-case words of any language and dashes, 60 characters at most."""
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:60] or "picture"


def claim(folder: Path, settings: dict[str, str]) -> None:
    """Reserve a folder for results with these settings, which are written to its settings.json.

    Raises:
        ValueError: If the folder holds results of other settings.
    """
    path = folder / CLAIM
    before = json.loads(path.read_text()) if path.exists() else settings
    if not isinstance(before, dict):
        raise ValueError(f"{path} is of another program: name another folder")
    if differ := [f"{name}={before.get(name)}" for name in settings if before.get(name) != settings[name]]:
        raise ValueError(f"{folder} holds results of {', '.join(differ)}: name another folder")
    if not path.exists():
        write_whole(path, json.dumps(settings, indent=2).encode())
