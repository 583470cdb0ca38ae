"""Emoji as tensors, cut out of one image."""

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from foveate.apps.demo import find

__all__ = ["CELL", "EMOJI", "OBJECT_NAMES", "load_atlas"]

CELL = 128  # pixels along each side of an emoji in the atlas

EMOJI: dict[str, str] = {
    name: character
    for character, _, name in (line.partition(" ") for line in find("emoji.txt").read_text("utf-8").splitlines())
}
"""Emoji by their names in captions, with article."""
OBJECT_NAMES = tuple(EMOJI)


def load_atlas() -> Float[Tensor, "emoji 4 cell cell"]:
    """The emoji in the order of `OBJECT_NAMES`, as premultiplied red, green, blue, and alpha, from 0 to 1."""
    with Image.open(find("atlas.png")) as sheet:
        pixels = torch.from_numpy(np.array(sheet.convert("RGBA"))).float() / 255
    cells = pixels.unflatten(0, (-1, CELL)).unflatten(2, (-1, CELL))  # row, y, column, x, channel
    emoji = cells.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(OBJECT_NAMES)]
    return torch.cat([emoji[:, :3] * emoji[:, 3:], emoji[:, 3:]], dim=1)
