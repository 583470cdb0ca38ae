"""What each part of HilbertA buys, with the built-in model: sliding, the centre, the order of the tokens.

python evals/ablation.py --size 256 --prompts 500 --batch 32          # as docs/results.md shows it

Every variant has 16 tiles; CLEAR's discs leave out as many pairs of tokens as they do.
"""

import typer
from clear import Clear, radius_for
from quality import Batch, Commit, Pictures, Prompts, Size, judge

from foveate import HilbertA
from foveate.demo.text import TEXT_TOKENS
from foveate.methods import Method

PIXELS = 4  # along each side of a token


def variants(size: int) -> list[Method]:
    """The whole method, then one change at a time."""
    whole, grid = HilbertA(tiles=16), (size // PIXELS, size // PIXELS)
    tables = whole.plan((grid,), TEXT_TOKENS).tables
    sparsity = sum(table.sparsity() for table in tables) / len(tables)
    return [
        whole,
        HilbertA(tiles=16, period=1),
        HilbertA(tiles=16, centre=0),
        HilbertA(tiles=16, curve="moore"),
        HilbertA(tiles=16, curve="raster"),
        Clear(radius=round(radius_for(sparsity, grid, TEXT_TOKENS), 2)),
    ]


def main(
    size: Size = 256,
    prompts: Prompts = 500,
    batch: Batch = 1,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "eval-ablation",
    commit: Commit = "",
) -> None:
    """Draw, judge and write."""
    judge("ablation", variants(size), size, prompts, batch, device, dtype, pictures, commit)


if __name__ == "__main__":
    typer.run(main)
