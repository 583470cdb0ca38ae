"""Draw the pictures of the documentation: `python docs/pictures.py`, from the root of the repository."""

import csv
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch.nn.functional import normalize

import foveate
from foveate import HilbertA, SubCP, ToMA
from foveate.demo import PIPELINE
from foveate.diffusers.pipelines import Request, draw, load
from foveate.methods.hilberta import HilbertPlan
from foveate.methods.sub_cp import STRATEGIES
from foveate.ops.block_table import block_starts, block_table
from foveate.ops.curves import grid_order
from foveate.utils.files import write_whole
from foveate.web.report import draw_order, draw_table, draw_tiles, figure_png

COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
IMAGES = Path("docs/images")
SIDE = 32


def main() -> None:
    """Write every picture to docs/images."""
    plan = HilbertA(tiles=16).plan(((SIDE, SIDE),), 128)
    for phase in range(4):
        write_figure(f"hilbert-phase-{phase}", draw_plan("hilbert", (SIDE, SIDE), plan, phase))
    for curve in ("moore", "morton", "serpentine"):
        shape = (SIDE, SIDE)
        write_figure(curve, draw_plan(curve, shape, HilbertA(curve=curve, tiles=16).plan((shape,), 0), 0))
    wide = (27, 48)
    write_figure("hilbert-wide", draw_plan("hilbert", wide, HilbertA(tiles=8).plan((wide,), 0), 0))
    papers = HilbertA(tiles=16).plan(((64, 64),), 512)
    for phase in (0, 1):
        write_picture(f"table-phase-{phase}", draw_table(papers.tables[phase]))
    neighbours = block_table([range(max(0, i - 1), min(16, i + 2)) for i in range(16)], block_starts(1000))
    write_picture("table-neighbours", draw_table(neighbours, limit=256))
    write_picture("toma-regions", draw_merging())
    write_figure("sub-cp-strategies", draw_blocks())
    write_figure("training", draw_training(Path("evals/results/training.csv")))


def draw_plan(curve: str, shape: tuple[int, int], plan: HilbertPlan, phase: int) -> Figure:
    """The curve over the tiles of one phase."""
    return draw_order(grid_order(curve, *shape), *shape, plan.tile_maps[phase])


def draw_merging() -> Image.Image:
    """A picture of the built-in model with the regions in which tokens merged, and those that others merged into."""
    pipe = load(str(PIPELINE), "cpu")
    with foveate.apply(pipe, ToMA(keep=0.25)) as run:
        image = draw(pipe, Request("an owl on a purple background", (128, 128), 20, None, 0))
        (regions,) = run.plans().values()
    return draw_tiles(image, regions.tile_maps[0], regions.picked)


def draw_blocks() -> Figure:
    """The blocks of each strategy: directions near one another in skewed clusters, seen from above."""
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
    """The loss of the built-in model's stages over the time they took, from the log of their training."""
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
