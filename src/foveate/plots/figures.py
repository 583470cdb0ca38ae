"""Images and plots of orders, tiles, attention, block tables and training runs."""

import io
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from skimage.segmentation import find_boundaries
from torch import Tensor

from foveate.methods.example_blocks import Report
from foveate.ops.block_table import BlockTable

__all__ = [
    "BLUE",
    "INK",
    "draw_attention",
    "draw_coverage",
    "draw_losses",
    "draw_order",
    "draw_sheet",
    "draw_table",
    "draw_tiles",
    "enlarged",
    "figure_png",
    "strip",
]

# Paul Tol's "light" scheme, distinguishable with colour blindness and under a dark line. The centre is grey.
TILE_COLOURS = ("#77AADD", "#EEDD88", "#44BB99", "#EE8866", "#99DDFF", "#BBCC33", "#FFAABB", "#AAAA00")
CENTRE_GREY = "#DDDDDD"
INK, PAPER, BLUE, ORANGE = "#1F2933", "#FFFFFF", "#0072B2", "#E69F00"


def draw_order(
    order: Int[Tensor, "cells"],
    height: int,
    width: int,
    tile_map: Int[Tensor, "rows columns"] | None = None,
    moved: tuple[int, ...] = (0, 0),
) -> Figure:
    """Figure of a curve through the cells of a grid, over its tiles; row 0 is on top.

    Args:
        order: Raster index of the cell at each step of the curve.
        height: Rows of the grid.
        width: Columns of the grid.
        tile_map: Tile of each cell, -1 in the central region; None draws no tiles.
        moved: Offset of the curve in rows and columns, with wrap-around at the edges.

    Raises:
        ValueError: If the order or the tile map does not fit the grid.
    """
    if len(order) != height * width:
        raise ValueError(
            f"an order of {len(order)} cells does not fill a {height} x {width} grid: give the sides of its grid"
        )
    if tile_map is not None and tuple(tile_map.shape) != (height, width):
        raise ValueError(f"the tile map is {tuple(tile_map.shape)}: give one of the order's ({height}, {width}) grid")
    cell = 6.0 / max(height, width)  # inches
    figure = Figure(figsize=(max(width * cell, 2.6), max(height * cell, 0.6) + 0.4), layout="constrained")
    axes = figure.add_subplot(
        aspect="equal", xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[]
    )
    axes.spines[:].set_color("#9AA5B1")
    if tile_map is not None:
        _fill_tiles(axes, tile_map.cpu().numpy())
    rows, columns = np.divmod(order.cpu().numpy(), width)
    rows, columns = rows + moved[0], columns + moved[1]
    around = np.flatnonzero(np.diff(rows // height) | np.diff(columns // width)) + 1
    rows, columns = rows % height, columns % width
    points = 72 * cell
    line = (np.insert(x.astype(float), around, np.nan) for x in (columns, rows))  # broken where it leaves an edge
    axes.plot(*line, color=INK, linewidth=np.clip(0.14 * points, 0.5, 2.6), solid_joinstyle="round")
    size = np.clip(0.45 * points, 6, 14)
    marker: dict[str, Any] = {"markersize": size, "markeredgecolor": PAPER, "linestyle": "", "clip_on": False}
    axes.plot(columns[0], rows[0], "o", color=BLUE, label="start", zorder=3, **marker)
    axes.plot(columns[-1], rows[-1], "s", color="#D55E00", label="end", zorder=3, **marker)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handletextpad=0.3, columnspacing=1.4)
    return figure


def draw_tiles(
    image: Image.Image, tile_map: Int[Tensor, "rows columns"], picked: Int[Tensor, "picked"] | None = None
) -> Image.Image:
    """The image with the borders of tiles in white and the central region outlined in orange.

    An image narrower than 384 pixels is first enlarged by a whole factor.

    Args:
        image: The image.
        tile_map: Tile of each token, -1 in the central region.
        picked: Raster indices of the tokens to mark with a dot.
    """
    picture = enlarged(image)
    height, width = tile_map.shape
    rows = np.arange(picture.height) * height // picture.height
    columns = np.arange(picture.width) * width // picture.width
    tiles = tile_map.cpu().numpy()[np.ix_(rows, columns)]
    pen = max(1, picture.width // 512)
    _outline(picture, tiles, PAPER, pen)
    _outline(picture, tiles == -1, ORANGE, 2 * pen)
    pencil, radius = ImageDraw.Draw(picture), max(1.0, picture.width / width / 6)
    for cell in [] if picked is None else picked.tolist():
        y, x = (cell // width + 0.5) * picture.height / height, (cell % width + 0.5) * picture.width / width
        pencil.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ORANGE, outline=INK)
    return picture


def draw_attention(image: Image.Image, weights: Float[Tensor, "rows columns"], token: tuple[int, int]) -> Image.Image:
    """The image in dark grey, lit in orange where a token attends; the token itself is framed in white.

    The light is the square root of the weight, relative to the largest one. An image narrower than 384 pixels is
    first enlarged by a whole factor.

    Args:
        image: The image.
        weights: Attention weight of each image token.
        token: (row, column) of the token that attends.
    """
    picture = enlarged(image)
    grey = ImageEnhance.Brightness(picture.convert("L").convert("RGB")).enhance(0.5)
    light = (weights.cpu() / weights.max().cpu().clamp(min=1e-12)).sqrt().mul(230).byte().numpy()
    mask = Image.fromarray(light).resize(picture.size, Image.Resampling.NEAREST)
    lit = Image.composite(Image.new("RGB", picture.size, ORANGE), grey, mask)
    (row, column), (rows, columns) = token, weights.shape
    high, wide = picture.height / rows, picture.width / columns
    frame = (column * wide - 1, row * high - 1, (column + 1) * wide, (row + 1) * high)
    pencil, pen = ImageDraw.Draw(lit), max(2, picture.width // 256)
    pencil.rectangle(tuple(edge + (-pen if i < 2 else pen) for i, edge in enumerate(frame)), outline=INK, width=pen)
    pencil.rectangle(frame, outline=PAPER, width=pen)
    return lit


def draw_table(table: BlockTable, limit: int = 512) -> Image.Image:
    """Image of a block table: rows are query blocks, columns key blocks; blue blocks are read.

    The empty blocks of a padded table are left out.

    Args:
        table: The table.
        limit: Maximum side in pixels. In a larger table a pixel is several blocks, blue if any of them is read; in a
            smaller one a block is several pixels.
    """
    rows, columns = _used(table.query_starts), _used(table.key_starts)
    blocks = max(rows, columns)
    shrink, grow = -(-blocks // limit), max(1, limit // blocks)
    read = np.zeros((-(-rows // shrink), -(-columns // shrink)), dtype=bool)
    for i, keys in enumerate(table.lists()[:rows]):
        read[i // shrink, np.asarray(keys, dtype=int) // shrink] = True
    colours = np.array([(238, 241, 244), (0, 114, 178)], dtype=np.uint8)  # pale grey, BLUE
    picture = Image.fromarray(colours[read.astype(int)].repeat(grow, 0).repeat(grow, 1))
    framed = Image.new("RGB", (picture.width + 2, picture.height + 2), "#9AA5B1")
    framed.paste(picture, (1, 1))
    return framed


def strip(pictures: Sequence[Image.Image]) -> Image.Image:
    """One image with the given images side by side."""
    return pictures[0] if len(pictures) == 1 else Image.fromarray(np.hstack([np.asarray(one) for one in pictures]))


def draw_sheet(rows: dict[str, list[Image.Image]], captions: list[str]) -> Figure:
    """Figure with a grid of images: a row for each name, a column for each caption."""
    height, width = len(rows), len(captions)
    figure = Figure(figsize=(1.6 * width + 0.5, 1.6 * height + 0.8), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False)
    for axes_row, (name, pictures) in zip(grid, rows.items(), strict=True):
        axes_row[0].set_ylabel(fill(name, 20), fontsize=9)
        for axes, picture in zip(axes_row, pictures, strict=True):
            axes.imshow(picture)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    for axes, caption in zip(grid[0], captions, strict=True):
        axes.set_title(fill(caption, 22), fontsize=7)
    return figure


def draw_losses(losses: Sequence[float]) -> Figure:
    """Figure of the loss of every training step, with a running mean over a twentieth of the steps."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log")
    axes.plot(range(1, len(losses) + 1), losses, color=BLUE, linewidth=0.8, alpha=0.4)
    window = max(1, len(losses) // 20)
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(range(window, len(losses) + 1), means, color=BLUE)
    return figure


def draw_coverage(reports: dict[str, list[Report]]) -> Figure:
    """Bar chart of the coverage of a pool: worst block, mean block, all blocks together; mean over the reports."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(ylabel="coverage of the pool", ylim=(0, 1), xticks=range(3))
    axes.set_xticklabels(["worst block", "mean block", "all blocks"])
    for i, (name, drawn) in enumerate(reports.items()):
        values = np.array([report[:3] for report in drawn])
        places = np.arange(3) + 0.8 * (i + 0.5) / len(reports) - 0.4
        spread = np.abs(np.stack([values.min(0), values.max(0)]) - values.mean(0))
        colour = (BLUE, ORANGE, "#9AA5B1")[i % 3]
        axes.bar(places, values.mean(0), 0.7 / len(reports), yerr=spread, label=name, color=colour, ecolor=INK)
    figure.legend(loc="outside lower center", ncols=len(reports), frameon=False)
    return figure


def enlarged(image: Image.Image, width: int = 384) -> Image.Image:
    """The image in RGB, enlarged by a whole factor to `width` pixels or more."""
    grow = max(1, -(-width // image.width))
    return image.convert("RGB").resize((image.width * grow, image.height * grow), Image.Resampling.NEAREST)


def figure_png(figure: Figure, dpi: int = 150) -> bytes:
    """Content of a PNG file of the figure, with `dpi` pixels per inch."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()


def _fill_tiles(axes: Axes, tiles: npt.NDArray[np.integer]) -> None:
    """Colour the cells by tile and hatch the central region."""
    colours, last = ListedColormap(TILE_COLOURS), len(TILE_COLOURS) - 1
    axes.imshow(tiles % len(TILE_COLOURS), cmap=colours, vmin=0, vmax=last, alpha=0.75, interpolation="nearest")
    rows, columns = np.nonzero(tiles == -1)
    if len(rows):
        corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
        cells = np.stack([columns, rows], axis=1)[:, None] + corners
        style: dict[str, Any] = {"facecolor": CENTRE_GREY, "edgecolor": "#8A8F98", "hatch": "////", "linewidth": 0}
        axes.add_collection(PolyCollection(list(cells), label="central region", **style), autolim=False)


def _outline(picture: Image.Image, labels: npt.NDArray[np.generic], colour: str, pen: int) -> None:
    """Draw a line of 2 `pen` pixels between different labels, with a dark rim."""
    line = Image.fromarray(find_boundaries(labels)).convert("L")
    for reach, ink in ((pen, INK), (pen - 1, colour)):
        # some releases of Pillow crash on a filter of one pixel
        picture.paste(ink, mask=line.filter(ImageFilter.MaxFilter(2 * reach + 1)) if reach else line)


def _used(starts: Int[Tensor, "blocks_plus_1"]) -> int:
    """Number of blocks before the padding, which consists of empty blocks at the end."""
    return int((starts < starts[-1]).sum())
