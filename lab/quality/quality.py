"""Score dense and sparse image generation with the built-in model: scores to lab/results, images to docs/images.

python -m lab.quality.quality --size 256 --prompts 500 --batch 32
python -m lab.quality.quality --size 256 --prompts 500 --batch 32 --lora distilled-16  # a LoRA of foveate distill
python -m lab.quality.quality --size 128 --prompts 500 --batch 32 --model trained --guidance 3
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foveate.apps.console import progress
from foveate.apps.demo.efficientnet import why_missing
from foveate.apps.demo.evaluate import evaluate, score_table
from foveate.apps.web.compare import showcase
from foveate.methods import ToDo, ToFu, ToMA, ToMeSD
from foveate.pipelines.lora import Distilled, MethodLike, find_lora, load_lora
from foveate.pipelines.pixel import as_method
from foveate.pipelines.request import Request, load_pipeline
from foveate.utils.files import write_whole
from foveate_models import find
from lab.quality.common import SHEETS, Batch, Commit, Pictures, Prompts, Size, save_result


def main(
    size: Size = 256,
    prompts: Prompts = 500,
    batch: Batch = 1,
    lora: Annotated[str, typer.Option(help="Score this LoRA and its method instead of the default methods.")] = "",
    model: Annotated[
        str, typer.Option(help="Score this model of foveate train, with its own attention and dense.")
    ] = "",
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "eval",
    commit: Commit = "",
) -> None:
    """Generate, score and write the results."""
    judge(
        f"quality-{Path(lora or model).name}" if lora or model else "quality",
        [] if lora or model else [*showcase(), ToMA(keep=0.75), ToMeSD(), ToFu(), ToDo()],
        size=size,
        prompts=prompts,
        batch=batch,
        lora=lora,
        model=model,
        guidance=guidance,
        device=device,
        dtype=dtype,
        pictures=pictures,
        commit=commit,
    )


def judge(
    name: str,
    methods: Sequence[MethodLike] = (),
    *,
    size: int,
    prompts: int,
    batch: int,
    pictures: str,
    commit: str,
    lora: str = "",
    model: str = "",
    guidance: float | None = None,
    device: str = "auto",
    dtype: str = "auto",
    about: dict[str, Any] | None = None,
    sheet: bool = True,
) -> None:
    """Generate and score; write the scores with `about`, and the sheet of samples, under `name`.

    A LoRA is scored without it, with it throughout, and with method and LoRA only after a tenth or fifth of the steps.
    """
    if missing := why_missing():
        Console(stderr=True).print(missing, markup=False)
    pipe: Any = load_pipeline(model or str(find("pipeline")), device, dtype)
    out, scored = Path(pictures) / f"{size}px", list[MethodLike](methods)
    if model:
        scored.append(as_method(pipe))
    if lora:
        distilled = load_distilled(pipe, lora)
        late = [distilled._replace(method=replace(distilled.method, start_percent=start)) for start in (0.0, 0.1, 0.2)]
        scored += [late[0].method, *late]
    request = Request("", (size, size), 20, guidance, 0)
    with progress() as track:
        scores = evaluate(pipe, scored, out, prompts=prompts, request=request, batch=batch, track=track)
    if not scores:  # the main process has them
        return
    result = json.loads((out / "scores.json").read_text()) | (about or {})
    save_result(f"{name}-{pipe.device.type}-{size}px", result, commit)
    if sheet:
        write_whole(SHEETS / f"{name}-{size}px.png", (out / "sheet.png").read_bytes())
    Console().print(score_table(scores))


def load_distilled(pipeline: Any, lora: str) -> Distilled:
    """Load a LoRA into a pipeline. Returns the LoRA with its method.

    Raises:
        ValueError: If the LoRA was not made by foveate.
    """
    if (distilled := load_lora(pipeline, find_lora(lora))) is None:
        raise ValueError(f"{lora} does not say what it was distilled for: make one with foveate distill")
    return distilled


if __name__ == "__main__":
    typer.run(main)
