"""Results on disk: atomic writes, pictures that carry their settings, folders that belong to one setting."""

import io
import json
import os
import re
from pathlib import Path
from threading import get_ident

from PIL import Image
from PIL.PngImagePlugin import PngInfo

__all__ = ["claim", "png", "slug", "write_picture", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name that is renamed when the file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.part")  # unique to this writer
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_picture(path: Path, image: Image.Image, settings: dict[str, str]) -> None:
    """Write a PNG that carries its settings, see `png`."""
    write_whole(path, png(image, settings))


def png(image: Image.Image, settings: dict[str, str]) -> bytes:
    """A PNG that carries its settings as text chunks (`Image.open(path).text` reads them)."""
    chunks = PngInfo()
    for name, value in settings.items():
        chunks.add_itxt(name, value)
    file = io.BytesIO()
    image.save(file, format="png", pnginfo=chunks)
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
