"""Judge dense and sparse drawing with the built-in model: scores to evals/results, pictures to docs/images.

python evals/quality.py --size 256 --prompts 500 --batch 32          # as docs/results.md shows them
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foveate.cli.common import progress
from foveate.compare import showcase
from foveate.demo import PIPELINE
from foveate.evaluate import evaluate, score_table
from foveate.files import write_whole
from foveate.integrations.diffusers.pipelines import Request, load

RESULTS, SHEETS = Path("evals/results"), Path("docs/images")


def main(
    size: Annotated[int, typer.Option(help="Side of the pictures in pixels.")] = 256,
    prompts: Annotated[int, typer.Option(help="Held-out captions.")] = 500,
    steps: int = 20,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="Pictures drawn together.")] = 1,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Annotated[Path, typer.Option(help="Folder of the pictures; a run found there is gone on with.")] = Path(
        "eval"
    ),
    commit: Annotated[str, typer.Option(help="The commit that is judged, where git cannot tell.")] = "",
) -> None:
    """Draw, judge and write."""
    pipe, out = load(str(PIPELINE), device, dtype), pictures / f"{size}px"
    request = Request("", (size, size), steps, None, seed)
    with progress() as track:
        scores = evaluate(pipe, showcase(), out, prompts=prompts, request=request, batch=batch, track=track)
    result = json.loads((out / "scores.json").read_text())
    if commit:
        result["versions"]["commit"] = commit
    name = f"quality-{pipe.device.type}-{size}px"
    write_whole(RESULTS / f"{name}.json", json.dumps(result, indent=2).encode() + b"\n")
    write_whole(SHEETS / f"quality-{size}px.png", (out / "sheet.png").read_bytes())
    Console().print(score_table(scores))


if __name__ == "__main__":
    typer.run(main)
