# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Training of the built-in model from scratch: recogniser, autoencoder, transformer, then the pipeline folder."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState
from diffusers import AutoencoderKL

from foveate.apps.console import Minutes, RunFolder, SampleEvery, Seed, print_outcome, progress, training_device
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.training.run import RunOptions
from lab.training.flow import FlowTraining, started
from lab.training.recogniser import train_recogniser
from lab.training.stages import RECIPE
from lab.training.vae import train_vae

__all__ = ["PARTS", "BatchFactor", "Compile", "Scale", "main"]

Scale = Annotated[
    float, typer.Option(min=0, help="Multiplies the recipe's images or videos, and its steps; 0.01 is a quick test.")
]
BatchFactor = Annotated[
    float, typer.Option(min=0, help="Multiplies the batch sizes, made for 140 GB of memory; 0.01 fits a CPU.")
]
Compile = Annotated[bool, typer.Option(help="Compile the blocks of the transformer, once for each size (GPU).")]

PARTS = ("recogniser", "vae", "flow")
RECOGNISER_STEPS, VAE_STEPS = 5000, 1500


def main(
    part: Annotated[str, typer.Option(help="recogniser, vae, flow (which needs the vae), or all.")] = "all",
    out: RunFolder = Path("demo-run"),
    start: Annotated[
        Path | None, typer.Option(help="Pipeline folder to fine-tune: runs only the last stage of the flow.")
    ] = None,
    seed: Seed = 0,
    minutes: Minutes = math.inf,
    scale: Scale = 1.0,
    batch: BatchFactor = 1.0,
    sample_every: SampleEvery = 1000,
    compile: Compile = False,
) -> None:
    """Train the built-in model from scratch: the recogniser that scores it, the autoencoder, the transformer.

    The folder gets the layout of the package's data: pipeline/, recogniser.safetensors and recipe.json. You may stop
    it at any time; the same command resumes from the newest checkpoint. On several GPUs:

    accelerate launch --multi_gpu --num_processes 4 -m lab built-in --compile
    """
    if part not in (*PARTS, "all"):
        raise ValueError(f"unknown part {part!r}: choose {', '.join(PARTS)} or all")
    if start and part not in ("flow", "all"):
        raise ValueError(f"--start trains the flow further and makes no {part}: leave --part out")
    parts = ("flow",) if start else PARTS if part == "all" else (part,)
    device, state = training_device("auto"), PartialState()
    weights, vae = out / "recogniser.safetensors", out / "pipeline" / "vae"
    made = {"recogniser": weights.exists(), "vae": (vae / "config.json").exists(), "flow": False}
    state.wait_for_everyone()  # before one of them makes a part
    parts, done = [part for part in parts if not made[part]], True
    with progress() as track:
        if "recogniser" in parts:
            steps = max(1, round(RECOGNISER_STEPS * scale))
            train_recogniser(weights, steps=steps, seed=seed, device=device, advance=track("recogniser", steps))
        if "vae" in parts:
            steps, model = max(1, round(VAE_STEPS * scale)), untrained_pipeline(seed=seed).vae
            train_vae(out / "vae", model, steps=steps, seed=seed, device=device, advance=track("vae", steps))
            if state.is_main_process:
                model.save_pretrained(vae)
            state.wait_for_everyone()
        if "flow" in parts:
            recipe = [stage.scaled(scale, batch) for stage in RECIPE[-1 if start else 0 :]]
            pipeline, before = _beginning(vae, start, seed)
            options = RunOptions(at_once=1, compile=compile, minutes=minutes, sample_every=sample_every, track=track)
            training = FlowTraining(
                out / "flow", pipeline, recipe, options, seed=seed, initialise=start is None, before=before
            )
            done = training.train()
    print_outcome(done, out)


def _beginning(vae: Path, start: Path | None, seed: int) -> tuple[Any, dict | None]:
    """Pipeline that the flow starts from, and its recipe."""
    if start is None:
        if not (vae / "config.json").exists():
            raise ValueError(f"{vae} holds no autoencoder: make it first with --part vae")
        pipeline = untrained_pipeline(seed=seed)
        pipeline.vae = AutoencoderKL.from_pretrained(vae).eval()
        return pipeline, None
    return started(start)
