"""Studies of the methods' options on the built-in model, without training: one change at a time.

python -m lab.quality.options merging --size 256 --prompts 500 --batch 32
python -m lab.quality.options sparse --size 512 --prompts 128 --batch 8
python -m lab.quality.options blocks --size 512 --prompts 128 --batch 8
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from foveate import LLSA, HilbertA, ToMA
from foveate.methods import Method
from foveate.methods.base import AttentionPlan, Grid
from lab.quality.common import Batch, Commit, Pictures, Prompts, Size
from lab.quality.quality import judge


@dataclass(frozen=True, kw_only=True)
class LLSAMeans(LLSA):
    """LLSA with an option of `foveate.ops.log_linear_attention` that LLSA does not set."""

    exclude_selected: bool = False

    @property
    def title(self) -> str:
        """The title of LLSA, and this option."""
        return super().title + self.non_defaults(("exclude_selected",))

    def plan(self, grids: tuple[Grid, ...], text: int, *, device: str = "cpu") -> AttentionPlan:
        """The plan of LLSA with this option."""
        plan = super().plan(grids, text, device=device)
        pattern: Any = plan.tables[0]
        options = pattern.options | {"exclude_selected": self.exclude_selected}
        return plan._replace(tables=(pattern._replace(options=options),), title=self.title)


STUDIES: dict[str, list[Method]] = {
    "merging": [
        ToMA(),
        ToMA(dst_every=1, weights_every=1),
        ToMA(dst_every=50, weights_every=50),
        ToMA(merge_every=3),
        ToMA(start_percent=0.2),
        ToMA(weights="hard"),
        ToMA(tile=(4, 4)),
        ToMA(tile=(16, 16)),
        ToMA(granularity="module"),
        ToMA(granularity="module", tile=(4, 4)),
        ToMA(skip=0),
        ToMA(skip=3),
    ],
    "sparse": [
        LLSA(),
        LLSA(top_k=16),
        LLSA(top_k=32),
        LLSA(curve="hilbert"),
        LLSA(enrich=False),
        LLSA(reweight=False),
        LLSAMeans(exclude_selected=True),
        LLSAMeans(top_k=16, exclude_selected=True),
        LLSA(start_percent=0.2),
        LLSA(top_k=16, start_percent=0.2),
        LLSA(top_k=32, start_percent=0.2),
        LLSA(top_k=16, start_percent=0.4),
        LLSA(top_k=32, start_percent=0.4),
        LLSA(top_k=16, start_percent=0.2, dense_layers="0-1"),
        LLSAMeans(top_k=16, exclude_selected=True, start_percent=0.2),
        HilbertA(tiles=4, start_percent=0.2, slide="curve"),
        HilbertA(tiles=4, start_percent=0.4, slide="curve"),
        HilbertA(tiles=4, start_percent=0.6, slide="curve"),
        HilbertA(tiles=4, start_percent=0.4, dense_layers="0-1", slide="curve"),
        HilbertA(tiles=4, start_percent=0.4),
        HilbertA(tiles=4, start_percent=0.6),
        HilbertA(tiles=16, start_percent=0.2, slide="curve"),
        HilbertA(tiles=16, start_percent=0.4, slide="curve"),
        HilbertA(tiles=16, start_percent=0.6, slide="curve"),
        HilbertA(tiles=16, start_percent=0.4, dense_layers="0-1", slide="curve"),
        HilbertA(tiles=16, start_percent=0.4),
    ],
    "blocks": [
        *(LLSA(top_k=keys // block, block_size=block) for keys in (256, 512) for block in (16, 32, 64)),
        LLSA(top_k=16, start_percent=0.4),
        LLSA(block_size=64, start_percent=0.4),
        LLSA(top_k=16, block_size=64, start_percent=0.4),
        LLSAMeans(top_k=16, exclude_selected=True, start_percent=0.4),
        LLSAMeans(block_size=64, exclude_selected=True, start_percent=0.4),
    ],
}
"""Methods by study; the others are changes of the first."""


def main(
    study: Annotated[str, typer.Argument(help="merging (of ToMA), sparse (LLSA and HilbertA), or blocks (of LLSA).")],
    size: Size = 256,
    prompts: Prompts = 500,
    batch: Batch = 1,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "eval-options",
    commit: Commit = "",
) -> None:
    """Generate, score and write the results."""
    if study not in STUDIES:
        raise typer.BadParameter(f"unknown study {study!r}: choose from {', '.join(STUDIES)}")
    judge(study, STUDIES[study], size=size, prompts=prompts, batch=batch, device=device, dtype=dtype,
          pictures=f"{pictures}/{study}", commit=commit, sheet=False)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
