"""Distil LoRAs for HilbertA, for its ablations and for CLEAR, and score them.

python -m lab.quality.distilled --out run-0 --only t16,t4           # on one GPU
python -m lab.quality.distilled --out run-1 --only t16-still,clear  # on another GPU
accelerate launch --num_processes 2 -m lab.quality.distilled --at-once 16 --only t16  # on both GPUs together

Every variant is scored without and with its LoRA. All have 16 tiles, rank 64 in all layers and shifted noise levels,
unless their name says otherwise, and are trained on the same images. CLEAR has the sparsity of 16 tiles and runs on
FlexAttention, without compiled blocks in training. An existing run in --out is resumed.
"""

import csv
import math
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer

from foveate import HilbertA
from foveate.apps.console import progress
from foveate.apps.demo.scenes import captions
from foveate.apps.demo.text import TEXT_TOKENS
from foveate.methods import Method
from foveate.pipelines.request import Request, load_pipeline
from foveate.training.distill import distill
from foveate.training.pairs import make_pairs
from foveate.training.run import RunOptions
from foveate.training.student import Recipe
from foveate_models import find
from lab.quality.clear import Clear, radius_for, register
from lab.quality.common import Batch, Commit, Prompts, Size
from lab.quality.quality import judge

PIXELS = 4  # pixels along each side of a token
SEED = 10_000  # seed of the first training image; the seeds of the scored images begin at 0
LAST = 100  # the final loss is the mean over this number of steps
SHOWN = "t16", "t4-rank32"  # variants with images in docs/images

USUAL: dict[str, Any] = {"rank": 64, "layers": "all", "levels": "shifted", "optimizer": "adamw"}

VARIANTS: dict[str, tuple[Method | None, dict[str, Any]]] = {
    "t16": (HilbertA(tiles=16, slide="curve"), {}),
    "t4": (HilbertA(tiles=4, slide="curve"), {}),
    "t4-rank32": (HilbertA(tiles=4, slide="curve"), {"rank": 32}),
    "t16-paper": (HilbertA(tiles=16, slide="curve"), {"layers": "paper"}),
    "t16-uniform": (HilbertA(tiles=16, slide="curve"), {"levels": "uniform"}),
    "t16-rank4": (HilbertA(tiles=16, slide="curve"), {"rank": 4}),
    "t16-rank16": (HilbertA(tiles=16, slide="curve"), {"rank": 16}),
    "t16-rank256": (HilbertA(tiles=16, slide="curve"), {"rank": 256}),
    "t16-diagonal": (HilbertA(tiles=16), {}),
    "t4-diagonal": (HilbertA(tiles=4), {}),
    "t16-period8": (HilbertA(tiles=16, period=8, slide="curve"), {}),
    "t16-two-dense": (HilbertA(tiles=16, dense_layers="0-1", slide="curve"), {}),
    "t16-diagonal-two-dense": (HilbertA(tiles=16, dense_layers="0-1"), {}),
    "t16-raster-diagonal": (HilbertA(tiles=16, curve="raster", slide="diagonal"), {}),
    "t16-still": (HilbertA(tiles=16, period=1, slide="curve"), {}),
    "t16-bare": (HilbertA(tiles=16, centre=0, slide="curve"), {}),
    "t16-moore": (HilbertA(tiles=16, curve="moore", slide="curve"), {}),
    "t16-raster": (HilbertA(tiles=16, curve="raster", slide="curve"), {}),
    "clear": (None, {}),
}
"""Method and changed options of the recipe, by name; None is CLEAR, with a radius that depends on the size."""


def variant(name: str, size: int) -> tuple[Method, dict[str, Any]]:
    """Method and options of the recipe of this name, for square images of `size` pixels.

    Raises:
        ValueError: If the name is unknown, or the size is too small for 16 tiles.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
    method, options = VARIANTS[name]
    return method or _as_sparse(HilbertA(tiles=16), size), options


def _as_sparse(method: HilbertA, size: int) -> Clear:
    grid = (size // PIXELS, size // PIXELS)
    sparsity = mean(table.sparsity() for table in method.plan((grid,), TEXT_TOKENS).tables)
    return Clear(radius=round(radius_for(sparsity, grid, TEXT_TOKENS), 2))


def main(
    size: Size = 256,
    prompts: Prompts = 500,
    batch: Batch = 32,
    steps: Annotated[int, typer.Option(help="Training steps, with a batch of 32.")] = 1000,
    pictures: Annotated[int, typer.Option(help="Number of training images.")] = 2000,
    rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    cool_down: Annotated[
        float, typer.Option(help="Fraction of the steps at the end, over which the rate falls to 0.")
    ] = 1.0,
    at_once: Annotated[int, typer.Option(help="Batch size on a device.")] = 32,
    only: Annotated[str, typer.Option(help="Variants, separated by commas.")] = ",".join(VARIANTS),
    minutes: Annotated[float, typer.Option(help="Time limit for training a variant before it is scored.")] = math.inf,
    start: Annotated[Path | None, typer.Option(help="LoRA to start from; its file name is recorded.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the blocks for the training.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of images and LoRAs.")] = Path("eval-distilled"),
    commit: Commit = "",
) -> None:
    """Generate the training images, then distil and score one variant after the other."""
    register()
    request = Request("", (size, size), 20, None, SEED)
    texts = captions(pictures, SEED)
    for name, (method, options) in {name: variant(name, size) for name in only.split(",")}.items():
        chosen: dict[str, Any] = USUAL | {"rate": rate, "cool_down": cool_down} | options
        recipe = Recipe(method=method, **chosen)
        pipe: Any = load_pipeline(str(find("pipeline")))
        with progress() as track:
            advance = track("pictures", pictures)
            make_pairs(out / "pairs", pipe, texts, request, at_once=at_once, advance=advance)
            torch.compiler.reset()  # each variant compiles new graphs, and their number is limited
            folder = out / f"{name}-{steps}-steps"
            distill(
                folder,
                pipe,
                recipe,
                request,
                texts,
                pairs=out / "pairs",
                steps=steps,
                start=start,
                options=RunOptions(
                    at_once=at_once, compile=compile and not isinstance(method, Clear), minutes=minutes, track=track
                ),
            )
        judge(
            f"distilled-{folder.name}",
            size=size,
            prompts=prompts,
            batch=batch,
            lora=str(folder),
            pictures=str(out / "judged"),
            commit=commit,
            about={"training": training(folder, recipe, pictures, start)},
            sheet=name in SHOWN,
        )


def training(folder: Path, recipe: Recipe, pictures: int, start: Path | None = None) -> dict[str, Any]:
    """Recipe of a LoRA and outcome of its training, without the steps of `start`."""
    rows = csv.reader((folder / "log.csv").read_text().splitlines())
    losses, seconds = zip(*((float(loss), float(seconds)) for _, loss, seconds in rows), strict=True)
    settings = {name: value for name, value in asdict(recipe).items() if name != "method"}
    done = {
        "pictures": pictures,
        "steps": len(losses),
        "loss": mean(losses[-LAST:]),
        "seconds": round(sum(seconds), 1),
    }
    return {"method": repr(recipe.method), **settings, **done, **({"start": start.stem} if start else {})}


if __name__ == "__main__":
    typer.run(main)
