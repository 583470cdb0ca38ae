"""PNG files with the settings of their images as metadata."""

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from foveate.utils.files import write_whole

__all__ = ["png", "write_picture"]


def write_picture(path: Path, image: Image.Image, settings: dict[str, str], more: Sequence[Image.Image] = ()) -> None:
    """Write a PNG file with settings; see `png`."""
    write_whole(path, png(image, settings, more))


def png(image: Image.Image, settings: dict[str, str], more: Sequence[Image.Image] = ()) -> bytes:
    """Content of a PNG file with settings as text chunks (`Image.open(path).text` reads them).

    Further images follow the first as frames of an animated PNG.
    """
    chunks = PngInfo()
    for name, value in settings.items():
        chunks.add_itxt(name, value)
    file = io.BytesIO()
    image.save(file, format="png", pnginfo=chunks, save_all=bool(more), append_images=more)
    return file.getvalue()
