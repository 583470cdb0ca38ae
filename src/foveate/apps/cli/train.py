"""`foveate train`: a pixel diffusion transformer from scratch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.apps.cli.common import check_writable, read_size
from foveate.apps.console import (
    Checkpointing,
    CheckpointMinutes,
    CoolDown,
    Minutes,
    RunFolder,
    SampleEvery,
    TrainingDevice,
    TrainingDtype,
    clear_errors,
    numbers,
    print_outcome,
    progress,
    training_device,
)

__all__ = ["train"]

SHOWN = 8  # images on a sheet of samples


@clear_errors
def train(
    data: Annotated[
        str,
        typer.Option(
            help="Folder of images, with or without captions in .txt files beside them; or a data set's hub id. "
            "[dim]default: random scenes of emoji[/]"
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(
            help="Size in pixels of each stage, separated by commas, small images first: 64, or WIDTHxHEIGHT. "
            "A resumed run may add stages."
        ),
    ] = "32,64,128",
    steps: Annotated[
        str, typer.Option(help="Training steps of each stage, separated by commas; one number is that of all.")
    ] = "5000,5000,2000",
    dit: Annotated[str, typer.Option(help="Depth and width: DiT-T, DiT-XS, DiT-S, DiT-B.")] = "DiT-S",
    patch: Annotated[int, typer.Option(min=1, help="Pixels along each side of a token.")] = 1,
    attention: Annotated[str, typer.Option(help="Kind of attention: log-linear or dense.")] = "log-linear",
    top_k: Annotated[int, typer.Option(min=1, help="Log-linear: blocks that each block selects.")] = 8,
    block_size: Annotated[int, typer.Option(help="Log-linear: tokens of a block: 16, 32 or 64.")] = 16,
    levels: Annotated[
        int | None, typer.Option(help="Log-linear: pooled levels, 1 to 4. [dim]default: from the number of tokens[/]")
    ] = None,
    enrich: Annotated[
        bool, typer.Option(help="Log-linear: also attend to the means of blocks that are not selected.")
    ] = True,
    reweight: Annotated[bool, typer.Option(help="Log-linear: weight a mean by the number of its tokens.")] = True,
    curve: Annotated[str, typer.Option(help="Curve that orders the tokens.")] = "morton",
    start: Annotated[
        str,
        typer.Option(help="Folder of an earlier run with the initial weights; --dit and --patch must agree."),
    ] = "",
    batch: Annotated[
        str, typer.Option(help="Batch size over all devices of each stage, or one number for all.")
    ] = "64",
    at_once: Annotated[int, typer.Option(min=1, help="Largest batch on a device.")] = 64,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-4,
    cool_down: CoolDown = 0.0,
    optimizer: Annotated[
        str, typer.Option(help="adamw; or muon for the matrices inside blocks, at about the same learning rates.")
    ] = "adamw",
    average: Annotated[
        float, typer.Option(min=0, max=1, help="Decay of the average of the weights, which generates the images.")
    ] = 0.9999,
    checkpointing: Checkpointing = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks; takes a minute for each size.")
    ] = False,
    minutes: Minutes = float("inf"),
    checkpoint_minutes: CheckpointMinutes = 5,
    sample_every: SampleEvery = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**40, help="Random seed of weights, images, order and noise.")] = 0,
    out: RunFolder = Path("trained"),
    device: TrainingDevice = "auto",
    dtype: TrainingDtype = "auto",
) -> None:
    """Train a pixel diffusion transformer from scratch, with log-linear or dense attention.

    Small images come first: they teach shapes, large images teach detail. You may stop it at any time; the same
    command resumes the run. --out becomes a pipeline folder for generate --model.

    foveate train --size 32,64 --steps 5000 --compile

    foveate train --data faces --size 32,128 --steps 40000,80000 --batch 64,16 --out faces-128

    foveate train --dit DiT-T --size 16 --steps 200 --batch 16 --rate 1e-3 --average 0.99 --device cpu   # a quick test

    On several GPUs: accelerate launch --multi_gpu --num_processes 4 -m foveate train ...
    """
    stages = read_stages(size, steps, batch)
    check_writable(out)
    where = training_device(device, *(largest for *_, largest in stages))
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    from foveate.apps.demo.text import built_in_text_encoder
    from foveate.nn.pixel_dit import MODELS, PixelDiT
    from foveate.pipelines.pixel import PixelPipeline
    from foveate.training.pixel import PixelRecipe, Stage
    from foveate.training.pixel import train as train_pixels
    from foveate.training.run import RunOptions

    if dit not in MODELS:
        raise ValueError(f"unknown size {dit!r} of the model: choose {', '.join(MODELS)}")
    if dtype == "auto":
        dtype = "bfloat16" if where.startswith("cuda") else "float32"
    recipe = PixelRecipe(rate=rate, cool_down=cool_down, optimizer=optimizer, average=average, dtype=dtype, seed=seed)
    pictures = _pictures(data, seed)
    text_encoder, tokenizer = built_in_text_encoder() if pictures.captioned else (None, None)
    torch.manual_seed(seed)
    model = PixelDiT(
        **MODELS[dit], patch_size=patch, text_dim=text_encoder.config.d_model if text_encoder else None,
        attention=attention, order=curve, top_k=top_k, block_size=block_size, levels=levels, enrich=enrich,
        reweight=reweight,
    )  # fmt: skip
    if start:
        _load_weights(model, start)
    pipeline = PixelPipeline(model, FlowMatchEulerDiscreteScheduler(), tokenizer, text_encoder).to(where)
    with progress() as track:
        done = train_pixels(
            out, pipeline, pictures, [Stage(*stage) for stage in stages], recipe,
            RunOptions(
                at_once=at_once, checkpointing=checkpointing, compile=compile, minutes=minutes,
                checkpoint_minutes=checkpoint_minutes, sample_every=sample_every, track=track,
                captions=_captions(pictures, data, seed),
            ),
        )  # fmt: skip
    print_outcome(done, out)


def read_stages(size: str, steps: str, batch: str) -> list[tuple[tuple[int, int], int, int]]:
    """(height, width), steps and batch size of each stage, from comma-separated lists."""
    sizes = [read_size(one) for one in size.split(",")]
    counts = [_one_each("steps", steps, len(sizes)), _one_each("batch", batch, len(sizes))]
    return list(zip(sizes, *counts, strict=True))


def _one_each(name: str, text: str, stages: int) -> list[int]:
    """A positive number for each stage; a single one is that of all."""
    given = numbers(text)
    if min(given) < 1:
        raise ValueError(f"--{name} {text} has a number below 1: use 1 or more")
    if len(given) not in (1, stages):
        raise ValueError(f"--{name} {text} has {len(given)} numbers for {stages} sizes: give one, or one for each")
    return given * stages if len(given) == 1 else given


def _pictures(data: str, seed: int) -> Any:
    from foveate.apps.demo.scenes import ScenePictures
    from foveate.training.pictures import FolderPictures, HubPictures

    if not data:
        return ScenePictures(seed)
    return FolderPictures(Path(data)) if Path(data).is_dir() else HubPictures(data)


def _load_weights(model: Any, start: str) -> None:
    from foveate.pipelines.request import load_pipeline

    trained: Any = load_pipeline(start, "cpu", "float32")
    try:
        model.load_state_dict(trained.transformer.state_dict())
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            f"--start {start} does not fit: give the --dit and --patch that it was trained with, and images with "
            "captions if it had them, or without"
        ) from error


def _captions(pictures: Any, data: str, seed: int) -> list[str]:
    """Captions of the samples: held-out scenes, or the first images' captions."""
    from foveate.apps.demo.scenes import captions

    if not data:
        return captions(SHOWN, seed, evaluation=True)
    return [pictures.picture(index, (16, 16))[1] for index in range(min(SHOWN, pictures.count))]
