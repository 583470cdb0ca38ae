"""Ablation of the options of ToMA on the built-in model, one change at a time.

python -m lab.quality.merging --size 256 --prompts 500 --batch 32
"""

import typer

from foveate import ToMA
from foveate.methods import Method
from lab.quality.common import Batch, Commit, Pictures, Prompts, Size
from lab.quality.quality import judge

VARIANTS: list[Method] = [
    ToMA(),
    ToMA(dst_every=1, weights_every=1),
    ToMA(dst_every=50, weights_every=50),
    ToMA(merge_every=3),
    ToMA(start_percent=0.2),
    ToMA(select="grid"),
    ToMA(select="random"),
    ToMA(weights="hard"),
    ToMA(scale=100.0),
    ToMA(tile=(4, 4)),
    ToMA(tile=(16, 16)),
    ToMA(granularity="module"),
    ToMA(granularity="module", tile=(4, 4)),
    ToMA(size_bias=True),
    ToMA(skip=0),
    ToMA(skip=3),
]


def main(
    size: Size = 256,
    prompts: Prompts = 500,
    batch: Batch = 1,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "eval-merging",
    commit: Commit = "",
) -> None:
    """Draw, score and write the results."""
    judge("merging", VARIANTS, size=size, prompts=prompts, batch=batch, lora="", device=device, dtype=dtype,
          pictures=pictures, commit=commit, sheet=False)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
