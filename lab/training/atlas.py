"""Rendering of the atlas, the image with all emoji of the vocabulary, from the font."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from foveate.apps.demo.atlas import CELL, EMOJI, OBJECT_NAMES
from foveate.pipelines.image_files import write_picture

__all__ = ["draw_atlas", "main"]

FONT_SIZE = 109  # the only size that the font contains
FONT_PLACES = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf",
)


def draw_atlas(font: Path | None = None) -> Image.Image:
    """All emoji of the vocabulary in one image, row by row.

    Args:
        font: Bitmap version of Noto Color Emoji; None searches the folders of Linux distributions.

    Raises:
        ValueError: If the font is not found or has no bitmaps.
    """
    found = next((path for path in map(Path, [font] if font else FONT_PLACES) if path.is_file()), None)
    if found is None:
        where = font or "its usual places"
        raise ValueError(
            f"no Noto Color Emoji in {where}: install it (Debian: apt install fonts-noto-color-emoji) "
            "or name NotoColorEmoji.ttf with --font"
        )
    try:
        face = ImageFont.truetype(str(found), FONT_SIZE)
    except OSError as error:
        raise ValueError(
            f"{found} does not hold bitmaps of {FONT_SIZE} px: name the NotoColorEmoji.ttf of fonts-noto-color-emoji"
        ) from error
    columns = int(np.ceil(np.sqrt(len(OBJECT_NAMES))))
    sheet = Image.new("RGBA", (columns * CELL, -(-len(OBJECT_NAMES) // columns) * CELL))
    for index, name in enumerate(OBJECT_NAMES):
        row, column = divmod(index, columns)
        sheet.paste(_glyph(EMOJI[name], face), (column * CELL, row * CELL))
    return sheet


def _glyph(character: str, face: ImageFont.FreeTypeFont) -> Image.Image:
    """One emoji, cropped and centred in a square."""
    canvas = Image.new("RGBA", (2 * CELL, 2 * CELL))
    ImageDraw.Draw(canvas).text((CELL // 4, CELL // 4), character, font=face, embedded_color=True)
    drawn = canvas.crop(canvas.getbbox())
    drawn.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (CELL, CELL))
    square.paste(drawn, ((CELL - drawn.width) // 2, (CELL - drawn.height) // 2))
    return square


def main(
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("atlas.png"),
    font: Annotated[
        Path | None, typer.Option(help="NotoColorEmoji.ttf. [dim]default: where Linux distributions install it[/]")
    ] = None,
) -> None:
    """Render the emoji of the scenes from the font. Only a new vocabulary needs this; the package holds the result."""
    write_picture(out, draw_atlas(font), {"source": "Noto Color Emoji, SIL Open Font License 1.1"})
    print(out)
