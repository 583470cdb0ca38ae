"""Draw the images of the documentation: `python docs/pictures.py`, from the root of the repository."""

import csv
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch.nn.functional import normalize, pad

import foveate
from foveate import HilbertA, SubCP, ToMA
from foveate.methods.sub_cp import STRATEGIES
from foveate.ops.block_table import block_starts, block_table
from foveate.ops.curves import grid_order
from foveate.ops.hierarchical_pooling import select_blocks
from foveate.pipelines.request import Request, draw, load_pipeline
from foveate.plots.figures import draw_order, draw_table, draw_tiles, figure_png
from foveate.utils.files import write_whole
from foveate_models import find

COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
IMAGES = Path("docs/images")
SIDE = 32


def main() -> None:
    """Write the drawn images of the pages to docs/images."""
    method, grid = HilbertA(tiles=16), (SIDE, SIDE)
    plan = method.plan((grid,), 128)
    for phase in (0, 1):
        curve = draw_order(grid_order("hilbert", *grid), *grid, plan.tile_maps[phase], method.moved(grid, 16, phase))
        write_figure(f"hilbert-phase-{phase}", curve)
    write_picture("table-phase-0", draw_table(HilbertA(tiles=16).plan(((64, 64),), 512).tables[0]))
    neighbours = block_table([range(max(0, i - 1), min(16, i + 2)) for i in range(16)], block_starts(1000))
    write_picture("table-neighbours", draw_table(neighbours, limit=256))
    write_picture("toma-regions", draw_merging())
    write_picture("llsa-query", draw_query(Image.open(IMAGES / "built-in" / "owl.png")))
    write_figure("sub-cp-strategies", draw_blocks())
    write_figure("training", draw_training(Path("lab/results/training.csv")))


def draw_merging() -> Image.Image:
    """A picture of the built-in model with the windows in which tokens merged and the tokens that were kept."""
    pipe = load_pipeline(str(find("pipeline")), "cpu")
    with foveate.apply(pipe, ToMA(keep=0.25)) as run:
        image = draw(pipe, Request("an owl on a purple background", (128, 128), 20, None, 0))[0]
        (regions,) = run.plans().values()
    return draw_tiles(image, regions.tile_maps[0], regions.picked)


def draw_query(picture: Image.Image, query: int = 240, scale: int = 3) -> Image.Image:
    """A picture, and what one query block of LLSA reads of it: pixels of 8 blocks, and means of the others."""
    side = picture.width
    order = grid_order("morton", side, side)
    colours = torch.tensor(np.array(picture.convert("RGB"))).flatten(0, 1)[order].float()
    features = pad(normalize(colours - colours.mean(0), dim=1), (0, 29))[None, None]  # heads have 32 channels or more
    blocks, nodes = select_blocks(features, features, top_k=8, levels=2).lists
    seen = colours.unflatten(0, (-1, 256)).mean(1).repeat_interleave(256, 0)  # the top: means of 16 x 16 pixels
    for node in nodes[0, 0, query // 16].tolist():
        span = slice(256 * node, 256 * node + 256)
        seen[span] = colours[span].unflatten(0, (-1, 16)).mean(1).repeat_interleave(16, 0)  # means of 4 x 4 pixels
    for block in blocks[0, 0, query].tolist():
        seen[16 * block : 16 * block + 16] = colours[16 * block : 16 * block + 16]
    cells = order[16 * query : 16 * query + 16]
    left, top = scale * int((cells % side).min()), scale * int(cells.min() // side)
    sheet = Image.new("RGB", (scale * (2 * side + 8), scale * side), "white")
    for place, values in enumerate((colours, seen)):
        raster = torch.empty_like(values)
        raster[order] = values
        half = Image.fromarray(raster.view(side, side, 3).byte().numpy())
        half = half.resize((scale * side, scale * side), Image.Resampling.NEAREST)
        ImageDraw.Draw(half).rectangle((left, top, left + 4 * scale, top + 4 * scale), outline="red", width=2)
        sheet.paste(half, (place * scale * (side + 8), 0))
    return sheet


def draw_blocks() -> Figure:
    """The blocks that each strategy of Sub-CP makes of clustered embeddings, seen from above."""
    generator = torch.Generator().manual_seed(0)
    middles = torch.randn(7, 2, generator=generator).repeat_interleave(torch.tensor([40, 25, 15, 10, 10, 10, 10]), 0)
    spread = 0.75 * middles + 0.13 * torch.randn(len(middles), 2, generator=generator)
    pool = normalize(torch.cat([spread, torch.ones(len(spread), 1)], 1), dim=1)
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    for axes, strategy in zip(figure.subplots(1, len(STRATEGIES)), STRATEGIES, strict=True):
        axes.set(title=strategy, xticks=[], yticks=[])
        axes.scatter(*pool[:, :2].T, s=4, color="#9AA5B1")
        for block, colour in zip(
            SubCP(blocks=4, block_size=4, strategy=strategy).partition(pool).ids, COLOURS, strict=True
        ):
            axes.scatter(*pool[block, :2].T, s=45, facecolors="none", edgecolors=colour, linewidths=2)
    return figure


def draw_training(log: Path) -> Figure:
    """The loss of each stage of the built-in model's training over time."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="minutes", ylabel="loss", yscale="log")
    minutes, before, stages = 0.0, dict[str, int](), dict[str, list[tuple[float, float]]]()
    for stage, step, loss, seconds in csv.reader(log.read_text().splitlines()):
        minutes += (int(step) - before.get(stage, 0)) * float(seconds) / 60
        before[stage] = int(step)
        stages.setdefault(stage, []).append((minutes, float(loss)))
    for stage, points in stages.items():
        axes.plot(*zip(*points, strict=True), label=stage)
    axes.legend(frameon=False)
    return figure


def write_figure(name: str, figure: Figure) -> None:
    """Write a figure to docs/images."""
    write_whole(IMAGES / f"{name}.png", figure_png(figure, dpi=100))


def write_picture(name: str, picture: Image.Image) -> None:
    """Write a picture to docs/images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    picture.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
