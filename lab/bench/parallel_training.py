# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""Training steps on several GPUs, timed, and compared with one GPU if that has run before.

The weights of a distilled model are sharded by FSDP2, a pixel model is replicated. Weights and samples are random.

torchrun --nproc-per-node 1 -m lab.bench.parallel_training lab/results --model flux-dev --pixels 1024
torchrun --nproc-per-node 4 -m lab.bench.parallel_training lab/results --model flux-dev --pixels 1024
torchrun --nproc-per-node 4 -m lab.bench.parallel_training lab/results --model DiT-S --pixels 512 --compile
"""

import argparse
import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.distributed.tensor import DTensor

from foveate.apps.bench.models import MODELS
from foveate.methods import HilbertA
from foveate.nn import pixel_dit
from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import Request
from foveate.training.distill import Distillation
from foveate.training.pictures import NoisyLatents, NoisyPairs, seeded
from foveate.training.pixel import PixelRecipe, PixelTraining, Stage
from foveate.training.run import Run, RunOptions, make_accelerator
from foveate.training.student import Recipe, Student
from foveate.utils.device import choose_dtype, dtype_name
from foveate.utils.processes import join, leave
from lab.bench.ranks import exchange_shares, most_memory, save, slowest
from lab.bench.train import RandomPictures, random_dit

DISTILLED = "flux-dev", "built-in"
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
         "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}  # fmt: skip
"""Environment variables that `accelerate launch` sets for FSDP2, as configured in docs/scale.md."""


class RandomPairs(NoisyPairs):
    """Endless random latents and text embeddings.

    Args:
        latents: Shape of the latents of a sample.
        text: Shapes of its text embeddings, by name.
        dtype: Dtype of the text embeddings.
    """

    def __init__(self, latents: tuple[int, ...], text: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.count, self.seed, self.checksum = None, 0, "random"
        self.latents, self.text, self.dtype = latents, text, dtype

    def __getitem__(self, number: int) -> NoisyLatents:
        random = seeded("sample", self.seed, number)
        text = {name: torch.randn(shape, generator=random).to(self.dtype) for name, shape in self.text.items()}
        return NoisyLatents(torch.randn(self.latents, generator=random), torch.rand((), generator=random), text)


def distillation(options: Any, device: torch.device, dtype: torch.dtype, out: Path) -> Run:
    """LoRA distillation of a FLUX.1 for 16 tiles, as `foveate distill --checkpointing` prepares it."""
    model, size = MODELS[options.model], (options.pixels, options.pixels)
    pipe = model.build(device, dtype)
    config, request = pipe.transformer.config, Request("", size, 1, None, 0)
    recipe = Recipe(method=HilbertA(tiles=16), optimizer="adamw", batch=options.batch)
    accelerator = make_accelerator(device, recipe.optimizer)
    if options.compile:
        pipe.transformer.compile_repeated_blocks()
    student = Student(pipe, recipe, request)
    pipe.transformer.enable_gradient_checkpointing()
    text = {"prompt_embeds": (model.text, config.joint_attention_dim),
            "pooled_prompt_embeds": (config.pooled_projection_dim,)}  # fmt: skip
    pairs = RandomPairs((prod(student.family.grid), config.in_channels), text, dtype)
    return Distillation(out, pipe, student, pairs, accelerator, request, RunOptions(at_once=options.at_once))


def pixel_training(options: Any, device: torch.device, dtype: torch.dtype, out: Path) -> Run:
    """Training of a pixel model with log-linear attention, as `foveate train` prepares it."""
    recipe = PixelRecipe(dtype=dtype_name(dtype))
    accelerator = make_accelerator(device, recipe.optimizer, "bf16" if dtype == torch.bfloat16 else "no")
    pipe = PixelPipeline(random_dit(options.model), FlowMatchEulerDiscreteScheduler())
    stage = Stage((options.pixels, options.pixels), options.rounds + 4, options.batch)
    run = RunOptions(at_once=options.at_once, compile=options.compile)
    return PixelTraining(out, pipe, RandomPictures(), [stage], recipe, accelerator, run)


def main() -> None:
    """Time training steps on all GPUs, compare their losses with those of one GPU, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the JSON files, also that of one GPU")
    parser.add_argument("--model", default="flux-dev", choices=[*DISTILLED, *pixel_dit.MODELS])
    parser.add_argument("--pixels", type=int, default=1024, help="sides of the images")
    parser.add_argument("--batch", type=int, default=8, help="batch size over all GPUs")
    parser.add_argument("--at-once", type=int, default=1, help="largest batch on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--commit", help="commit of this code, where git cannot tell it")
    options, gpus = parser.parse_args(), int(os.environ["WORLD_SIZE"])
    if gpus > 1 and options.model in DISTILLED:
        os.environ.update(FSDP2)
    device = join().device
    torch.manual_seed(0)  # the same weights on every GPU
    make = distillation if options.model in DISTILLED else pixel_training
    training = make(options, device, choose_dtype("auto", device), options.out / "nothing-is-written-here")
    steps, losses = training.losses(options.rounds + 4), list[float]()
    step = lambda: losses.append(next(steps))  # noqa: E731
    seconds = slowest(step, options.rounds, device)
    row = {
        "sharded": isinstance(training.trained.weights[0], DTensor),  # accelerate never shards on CPUs
        "step_s": seconds,
        "images_per_s": options.batch / seconds,
        "peak_bytes": most_memory(step, device, beyond=False),
        **exchange_shares(step, device),
        "losses": losses,
    }
    about = {"what": "training steps on several GPUs", "model": options.model, "pixels": options.pixels,
             "batch": options.batch, "at_once": options.at_once, "compiled": options.compile,
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}  # fmt: skip
    file = f"parallel-training-{options.model}-{{}}-{device.type}.json"
    if gpus > 1:
        row |= compared(row, about, options.out / file.format(1))
    save(options.out / file.format(gpus), about, [row], options.commit)
    leave()


def compared(row: dict[str, Any], about: dict[str, Any], file: Path) -> dict[str, float]:
    """Speed-up over one GPU, and the largest relative difference between the losses of a step.

    Empty if one GPU has not run with the same settings on the same device.
    """
    one = json.loads(file.read_text()) if file.exists() else {}
    if {name: one.get(name) for name in about} != about:
        return {}
    [alone] = one["rows"]
    pairs = zip(row["losses"], alone["losses"], strict=True)
    return {
        "speed_up": alone["step_s"] / row["step_s"],
        "loss_difference": max(abs(got - want) / want for got, want in pairs),
    }


if __name__ == "__main__":
    main()
