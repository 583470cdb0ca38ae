# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Training of the built-in model from scratch: recogniser, autoencoder, transformer, then the pipeline folder."""

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from diffusers import AutoencoderKL

from foveate.cli.common import Minutes, RunFolder, Seed, print_outcome, progress
from foveate.demo.untrained import untrained_pipeline
from foveate.diffusers.pipelines import load
from foveate.utils.files import write_whole
from foveate.utils.progress import Track, silent
from lab.training.flow import FlowTraining
from lab.training.recogniser import train_recogniser
from lab.training.stages import RECIPE, Stage
from lab.training.vae import train_vae

__all__ = ["PARTS", "BatchFactor", "Compile", "SampleEvery", "Scale", "export", "main", "make"]

Scale = Annotated[
    float, typer.Option(min=0, help="Multiplies the recipe's pictures or videos, and its steps; 0.01 is a quick test.")
]
BatchFactor = Annotated[
    float, typer.Option(min=0, help="Multiplies the batches, made for 140 GB of memory; 0.01 fits a CPU.")
]
SampleEvery = Annotated[int, typer.Option(min=0, help="Steps between sheets of samples; 0: none.")]
Compile = Annotated[bool, typer.Option(help="Compile the transformer (GPU; a minute for each size).")]

PARTS = ("recogniser", "vae", "flow")
RECOGNISER_STEPS, VAE_STEPS = 5000, 1500


def make(
    out: Path,
    *,
    part: str = "all",
    start: Path | None = None,
    seed: int = 0,
    minutes: float = math.inf,
    scale: float = 1.0,
    batch: float = 1.0,
    sample_every: int = 1000,
    compile: bool = False,
    track: Track = silent,
) -> bool:
    """Train one part of the built-in model, or all parts. Returns whether the recipe is done.

    `out` has the layout of the package's data: pipeline/, recogniser.safetensors and recipe.json.

    Args:
        out: Folder of the run; an existing run is resumed.
        part: "recogniser", "vae", "flow" or "all".
        start: Pipeline folder to fine-tune with the last stage of the flow; no other part is trained.
        seed: Seed of weights, scenes and noise.
        minutes: Time after which the flow writes a checkpoint and stops.
        scale: Factor on the recipe's pictures and steps.
        batch: Factor on the flow's batch sizes.
        sample_every: Steps of the flow between sample grids; 0 draws none.
        compile: Compile the transformer.
        track: Shows progress.

    Raises:
        ValueError: If the part is unknown, the flow has no autoencoder, or `start` cannot be loaded.
    """
    if part not in (*PARTS, "all"):
        raise ValueError(f"unknown part {part!r}: choose {', '.join(PARTS)} or all")
    if start and part not in ("flow", "all"):
        raise ValueError(f"--start trains the flow further and makes no {part}: leave --part out")
    if start:
        part = "flow"
    state = PartialState()
    if not state.is_main_process:
        track = silent
    device, vae = str(state.device), out / "pipeline" / "vae"
    if part in ("recogniser", "all"):
        with state.main_process_first():
            if not (out / "recogniser.safetensors").exists():
                steps = max(1, round(RECOGNISER_STEPS * scale))
                advance = track("recogniser", steps)
                train_recogniser(
                    out / "recogniser.safetensors", steps=steps, seed=seed, device=device, advance=advance
                )
    if part in ("vae", "all"):
        with state.main_process_first():
            if not (vae / "config.json").exists():
                steps = max(1, round(VAE_STEPS * scale))
                advance = track("vae", steps)
                model = untrained_pipeline(seed=seed).vae
                train_vae(out / "vae", model, steps=steps, seed=seed, device=device, advance=advance)
                model.save_pretrained(vae)
    if part in ("flow", "all"):
        recipe = [stage.scaled(scale, batch) for stage in RECIPE[-1 if start else 0 :]]
        return _flow(out, start, recipe, seed, minutes, sample_every, compile, track)
    return True


def _flow(
    out: Path,
    start: Path | None,
    recipe: list[Stage],
    seed: int,
    minutes: float,
    sample_every: int,
    compile: bool,
    track: Track,
) -> bool:
    pipeline, before = _beginning(out, start, seed)
    training = FlowTraining(
        out / "flow", pipeline, initialise=start is None, recipe=recipe, seed=seed, compile=compile
    )
    done = training.run(minutes=minutes, sample_every=sample_every, track=track)
    if training.accelerator.is_main_process:
        export(training.pipeline, out / "pipeline")
        devices = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        about = {
            "stages": [asdict(stage) for stage in recipe],
            "seed": seed,
            "devices": f"{training.accelerator.num_processes} x {devices}",
            "minutes": training.minutes(),
            "before": before,
        }
        write_whole(out / "recipe.json", json.dumps(about, indent=2).encode() + b"\n")
    return done


def _beginning(out: Path, start: Path | None, seed: int) -> tuple[Any, dict | None]:
    """The pipeline that the flow starts from, and the recipe that trained it."""
    if start is None:
        vae = out / "pipeline" / "vae"
        if not (vae / "config.json").exists():
            raise ValueError(f"{vae} holds no autoencoder: make it first with --part vae")
        pipeline = untrained_pipeline(seed=seed)
        pipeline.vae = AutoencoderKL.from_pretrained(vae).eval()
        return pipeline, None
    recipe = start.parent / "recipe.json"
    return load(str(start), "cpu"), json.loads(recipe.read_text()) if recipe.exists() else None


def export(pipeline: Any, folder: Path) -> None:
    """Write a pipeline folder in bfloat16 that loads in float32.

    diffusers loads in float32 by default; transformers loads in the dtype of the config, which is set to float32.
    """
    pipeline = copy.deepcopy(pipeline).to(torch.bfloat16)
    for name, part in pipeline.components.items():
        if name.startswith("tokenizer"):
            part.backend_tokenizer.no_padding()  # the backend keeps the padding of its last call
    pipeline.save_pretrained(folder)
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        if path.parent.name.startswith("text_encoder"):
            config["dtype"] = "float32"
        config.pop("_name_or_path", None)  # a path on this machine
        write_whole(path, json.dumps(config, indent=2).encode() + b"\n")


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
    """Train the built-in model from scratch: the recogniser that judges it, the autoencoder, the transformer.

    You may stop it at any time; the same command resumes from the newest checkpoint. On several GPUs:

    torchrun --nproc-per-node 4 -m lab built-in --compile
    """
    with progress() as track:
        done = make(
            out, part=part, start=start, seed=seed, minutes=minutes, scale=scale, batch=batch,
            sample_every=sample_every, compile=compile, track=track,
        )  # fmt: skip
    print_outcome(done, out)
