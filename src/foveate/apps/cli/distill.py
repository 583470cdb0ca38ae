"""`foveate distill`: a LoRA for a sparse model."""

from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import Option, Tiles, check_writable, options_of, read_prompts
from foveate.apps.cli.methods import method_to_draw
from foveate.apps.cli.pictures import Frames, Model, Size, open_at_size, request_of
from foveate.apps.console import (
    Checkpointing,
    CheckpointMinutes,
    CoolDown,
    Dtype,
    Minutes,
    RunFolder,
    SampleEvery,
    Seed,
    TrainingDevice,
    clear_errors,
    print_outcome,
    progress,
    training_device,
)

__all__ = ["distill"]

BUILT_IN_PICTURES, BUILT_IN_STEPS, STEPS = 200, 300, 2800
SHOWN = 4  # captions on a sheet of samples


@clear_errors
def distill(
    model: Model = "",
    size: Size = None,
    frames: Frames = None,
    method: Annotated[str, typer.Option(help="Method to distil for, such as hilberta:tiles=16.")] = "hilberta",
    tiles: Tiles = None,
    option: Option = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt a line. [dim]default: scenes of the built-in model[/]"),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of training images, with captions in .txt files beside them or in --prompts."),
    ] = None,
    pictures: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of training images. [dim]default: one a prompt; for the built-in model 200[/]"
        ),
    ] = None,
    draw_steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Denoising steps of a training image. [dim]default: 20; with --model 28[/]"
        ),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(min=0, max=1000, help="Guidance scale of training images. [dim]default: the pipeline's[/]"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. [dim]default: 2800; for the built-in model 300[/]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size over all devices.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Largest batch on a device, for generating and training.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA.")] = 4,
    layers: Annotated[
        str,
        typer.Option(
            help="Layers with a LoRA: paper; or all, which adds the last layer, and in FLUX.1 the feed-forward and "
            "output layers of single blocks."
        ),
    ] = "paper",
    optimizer: Annotated[str, typer.Option(help="prodigy, which finds its own learning rate, or adamw.")] = "prodigy",
    rate: Annotated[
        float | None, typer.Option(min=0, help="Learning rate. [dim]default: 1 for prodigy, 1e-4 for adamw[/]")
    ] = None,
    noise_levels: Annotated[
        str, typer.Option(help="Noise levels: uniform, or shifted towards noise as the scheduler shifts them.")
    ] = "uniform",
    cool_down: CoolDown = 0.0,
    guidance_input: Annotated[
        float, typer.Option(min=0, help="Guidance scale given to teacher and student during training.")
    ] = 1.0,
    checkpointing: Checkpointing = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the repeated blocks: takes a minute, then about twice as fast.")
    ] = False,
    start: Annotated[str, typer.Option(help="LoRA to start from, for example one of a smaller size.")] = "",
    minutes: Minutes = float("inf"),
    checkpoint_minutes: CheckpointMinutes = 5,
    sample_every: SampleEvery = 100,
    seed: Seed = 42,
    out: RunFolder = Path("distilled"),
    device: TrainingDevice = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Distil a LoRA that teaches the sparse model to predict what the dense model predicts.

    The dense model generates the training images or videos, then the LoRA is trained. The model is FLUX.1 (text to
    image) or Wan 2.1 (text to video). You may stop it at any time; the same command resumes the run. generate, compare
    and eval load the result with --lora, diffusers with pipe.load_lora_weights(...).

    foveate distill --tiles 16 --size 256

    foveate distill --model black-forest-labs/FLUX.1-dev --tiles 16 --prompts prompts.txt --checkpointing

    foveate distill --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --size 832x480 --prompts prompts.txt --checkpointing

    On several GPUs: accelerate launch --multi_gpu --num_processes 4 -m foveate distill ...
    """
    from foveate.methods import Method

    chosen = method_to_draw(None, method, options_of(option, tiles))
    if not isinstance(chosen, Method):
        raise ValueError(f"a LoRA is distilled for one sparse method, not for {method}: name one, such as hilberta")
    check_writable(out)
    lines = read_prompts(prompts) if prompts else None
    if model and not (prompts or images):
        raise ValueError("name prompts with --prompts FILE, one a line, or training images with --images")
    where = training_device(device, batch)
    from foveate.pipelines.lora import find_lora

    first = find_lora(start) if start else None
    pipe, _, _ = open_at_size(model, "", size, where, dtype)
    request = request_of(pipe, model, "", size, draw_steps, guidance, seed, frames=frames)
    from foveate.apps.demo.scenes import captions
    from foveate.training.distill import distill
    from foveate.training.pictures import captioned
    from foveate.training.run import RunOptions
    from foveate.training.student import Recipe

    recipe = Recipe(
        method=chosen, rank=rank, layers=layers, optimizer=optimizer, rate=rate, levels=noise_levels,
        cool_down=cool_down, batch=batch, guidance=guidance_input, seed=seed,
    )  # fmt: skip
    files: list[Path] = []
    if images:
        both = dict(islice(captioned(images, lines).items(), pictures))
        files, texts = list(both), list(both.values())
    else:
        count = pictures or (len(lines) if lines else BUILT_IN_PICTURES)
        texts = list(islice(cycle(lines), count)) if lines else captions(count, seed)
    with progress() as track:
        done = distill(
            out, pipe, recipe, request, texts, pictures=files, steps=steps or (STEPS if model else BUILT_IN_STEPS),
            start=first,
            options=RunOptions(
                at_once=at_once, checkpointing=checkpointing, compile=compile, minutes=minutes,
                checkpoint_minutes=checkpoint_minutes, sample_every=sample_every, track=track,
                captions=texts[:SHOWN] if model else captions(SHOWN, seed, evaluation=True),
            ),
        )  # fmt: skip
    print_outcome(done, out)
