"""The emoji as tensors: drawn once from the font into one picture, cut apart when loaded."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from foveate.demo import DATA
from foveate.utils.files import write_picture

__all__ = ["ATLAS", "EMOJI", "NAMES", "draw_atlas", "load_atlas", "write_atlas"]

ATLAS = DATA / "atlas.png"
CELL = 128  # px, about what the font stores
FONT_SIZE = 109  # the one size the font stores
FONT_PLACES = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf",
)

EMOJI: dict[str, str] = {
    name: character
    for character, _, name in (line.partition(" ") for line in (DATA / "emoji.txt").read_text("utf-8").splitlines())
}
"""What a caption calls an emoji, with its article: the emoji."""
NAMES = tuple(EMOJI)


def draw_atlas(font: Path | None = None) -> Image.Image:
    """Every emoji of the vocabulary on one sheet, row by row.

    Args:
        font: Noto Color Emoji in its bitmap form; looked for where distributions put it when left out.

    Raises:
        ValueError: if there is no such font.
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
    columns = _columns()
    sheet = Image.new("RGBA", (columns * CELL, -(-len(NAMES) // columns) * CELL))
    for index, name in enumerate(NAMES):
        row, column = divmod(index, columns)
        sheet.paste(_glyph(EMOJI[name], face), (column * CELL, row * CELL))
    return sheet


def write_atlas(path: Path, font: Path | None = None) -> None:
    """Draw the atlas from the font into a PNG."""
    write_picture(path, draw_atlas(font), {"source": "Noto Color Emoji, SIL Open Font License 1.1"})


def load_atlas(path: Path = ATLAS) -> Float[Tensor, "emoji 4 cell cell"]:
    """The emoji in the order of `NAMES`: red, green, blue times alpha, and alpha, from 0 to 1."""
    with Image.open(path) as sheet:
        pixels = torch.from_numpy(np.array(sheet.convert("RGBA"))).float() / 255
    cells = pixels.unflatten(0, (-1, CELL)).unflatten(2, (-1, CELL))  # row, y, column, x, channel
    emoji = cells.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(NAMES)]
    return torch.cat([emoji[:, :3] * emoji[:, 3:], emoji[:, 3:]], dim=1)


def _columns() -> int:
    return int(np.ceil(np.sqrt(len(NAMES))))


def _glyph(character: str, face: ImageFont.FreeTypeFont) -> Image.Image:
    """One emoji, cut to what is drawn, centred in a square."""
    canvas = Image.new("RGBA", (2 * CELL, 2 * CELL))
    ImageDraw.Draw(canvas).text((CELL // 4, CELL // 4), character, font=face, embedded_color=True)
    drawn = canvas.crop(canvas.getbbox())
    drawn.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (CELL, CELL))
    square.paste(drawn, ((CELL - drawn.width) // 2, (CELL - drawn.height) // 2))
    return square
