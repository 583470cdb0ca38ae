"""The command that distils: a LoRA with which a sparse model draws as its dense self."""

from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.common import (
    Dtype,
    Model,
    Size,
    clear_errors,
    console,
    open_model,
    options_of,
    progress,
    request_of,
    training_device,
)
from foveate.methods import METHODS, method_from_text

__all__ = ["distill"]

BUILT_IN_PICTURES, BUILT_IN_STEPS, STEPS = 200, 300, 2800
SHOWN = 4  # captions of a sheet of samples


@clear_errors
def distill(
    model: Model = "",
    size: Size = None,
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}.")] = "hilberta",
    tiles: Annotated[str | None, typer.Option(help="Tiles of the method: a number, or auto.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Any option of the method: -o centre=0 -o period=2.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line. [dim]default: training scenes of the built-in[/]")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of pictures to learn from, captions in .txt files beside them or in --prompts."),
    ] = None,
    pictures: Annotated[
        int | None,
        typer.Option(min=1, help="Pictures to learn from. [dim]default: 200 for the built-in, else one a prompt[/]"),
    ] = None,
    draw_steps: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Denoising steps of a picture. [dim]default: 20, or 28 with --model[/]"),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(min=0, max=1000, help="Guidance scale of pictures. [dim]default: the pipeline's[/]"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. [dim]default: 300 for the built-in, else 2800[/]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a step, over all devices.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Pictures that a device draws, or sees, together.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA.")] = 4,
    layers: Annotated[
        str, typer.Option(help="paper, or all: feed-forward and output of single blocks too, and the last layer.")
    ] = "paper",
    optimizer: Annotated[str, typer.Option(help="prodigy, which finds its own rate, or adamw.")] = "prodigy",
    rate: Annotated[
        float | None, typer.Option(min=0, help="Learning rate. [dim]default: 1 for prodigy, 1e-4 for adamw[/]")
    ] = None,
    levels: Annotated[
        str, typer.Option(help="How noisy: uniform, or shifted towards noise, as drawing meets the levels.")
    ] = "uniform",
    cool_down: Annotated[
        float, typer.Option(min=0, max=1, help="Last fraction of the steps, over which the rate falls to 0.")
    ] = 0.0,
    guidance_input: Annotated[
        float, typer.Option(min=0, help="Guidance scale that teacher and student are told.")
    ] = 1.0,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing: slower, much less memory.")
    ] = False,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile the repeated blocks: a minute, then about twice as fast."),
    ] = False,
    start: Annotated[str, typer.Option(help="LoRA to begin with: of a smaller size, say.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="Write a checkpoint and stop after so long.")] = float("inf"),
    sample_every: Annotated[int, typer.Option(min=0, help="Steps between sheets of samples; 0: at the end.")] = 100,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of pictures, their order and noise, and of the LoRA.")
    ] = 42,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is found there is gone on with.")] = Path(
        "distilled"
    ),
    device: Annotated[str, typer.Option(help="auto or cpu. accelerate launch picks the GPUs.")] = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Distil a LoRA: the dense model teaches its sparse self to predict what it predicts.

    First the dense model draws the pictures to learn from; then the LoRA is trained. Stop it when you like, Ctrl-C or
    worse: the same command goes on where it was. The LoRA lies in --out, which is what --lora of generate, compare and
    eval takes; so does pipe.load_lora_weights of diffusers.

    foveate distill --tiles 16 --size 256

    foveate distill --model black-forest-labs/FLUX.1-dev --tiles 16 --prompts prompts.txt --checkpointing

    On several GPUs: accelerate launch --num_processes 4 -m foveate distill ...
    """
    chosen = method_from_text(method, options_of(option, tiles))
    lines = _lines(prompts) if prompts else None
    if model and not (prompts or images):
        raise ValueError("name what to draw with --prompts FILE, a prompt a line, or what to learn from with --images")
    where = training_device(device)
    pipe = open_model(model, where, dtype)
    request = request_of(pipe, model, "", size, draw_steps, guidance, seed)
    from foveate.diffusers.lora import find_lora
    from foveate.training.distill import distill
    from foveate.training.pairs import captioned
    from foveate.training.student import Recipe

    recipe = Recipe(
        method=chosen, rank=rank, layers=layers, optimizer=optimizer, rate=rate, levels=levels, cool_down=cool_down,
        batch=batch, guidance=guidance_input, seed=seed,
    )  # fmt: skip
    files: list[Path] = []
    if images:
        both = dict(islice(captioned(images, lines).items(), pictures))
        files, texts = list(both), list(both.values())
    else:
        texts = list(islice(cycle(lines), pictures or len(lines))) if lines else _scenes(seed, pictures)
    shown = texts[:SHOWN] if model else _scenes(seed, SHOWN, evaluation=True)
    with progress() as track:
        done = distill(
            out,
            pipe,
            recipe,
            request,
            texts,
            pictures=files,
            captions=shown,
            steps=steps or (STEPS if model else BUILT_IN_STEPS),
            start=find_lora(start) if start else None,
            at_once=at_once,
            checkpointing=checkpointing,
            compile=compile,
            minutes=minutes,
            sample_every=sample_every,
            track=track,
        )
    console.print("done" if done else "stopped in time; the same command goes on from here")
    if not console.quiet:
        print(out)


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompts: write one a line")
    return lines


def _scenes(seed: int, count: int | None, *, evaluation: bool = False) -> list[str]:
    """Captions that the built-in model knows."""
    from foveate.demo.scenes import scenes

    return [scene.caption for scene in islice(scenes(seed, evaluation=evaluation), count or BUILT_IN_PICTURES)]
