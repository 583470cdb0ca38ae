# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""LoRA distillation: the dense model teaches its sparse self, from its own pictures."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DataLoaderConfiguration
from diffusers import FluxPipeline

from foveate.integrations.diffusers.pipelines import Request, noise_shift
from foveate.methods import HilbertA
from foveate.training.pairs import NoisyPairs, make_pairs
from foveate.training.run import Distillation
from foveate.training.student import Recipe, Student

__all__ = ["distill"]


def distill(
    out: Path,
    pipeline: FluxPipeline,
    recipe: Recipe,
    request: Request,
    prompts: Sequence[str],
    *,
    pictures: Sequence[Path] = (),
    pairs: Path | None = None,
    captions: Sequence[str] = (),
    steps: int,
    start: Path | None = None,
    at_once: int = 1,
    checkpointing: bool = False,
    compile: bool = False,
    minutes: float = math.inf,
    sample_every: int = 0,
    track: Callable[[str, int], Callable[[], None]] = lambda name, length: lambda: None,
) -> bool:
    """Make the pictures, then train the LoRA; whether all steps were made. The pipeline keeps the LoRA.

    Args:
        out: Folder of the run. What is found there is gone on with.
        pipeline: Teacher and student.
        recipe: How the student learns.
        request: Size, denoising steps, guidance and first seed of the teacher's pictures; its prompt is not used.
        prompts: One for each picture.
        pictures: Files to learn from; without any, the teacher draws.
        pairs: Folder of their latents and text embeddings, which other runs may share once all are there; None is one
            in `out`.
        captions: Of the samples.
        steps: How many there are to be, with those of earlier runs.
        start: The LoRA to begin with.
        at_once: Pictures that a device draws, encodes or sees together.
        checkpointing: Run layers again in the backward pass, to save memory.
        compile: Compile the repeated blocks: the first step takes a minute longer, all others half the time.
        minutes: When to write a checkpoint and stop.
        sample_every: Steps between sheets of samples; 0 draws one at the end alone.
        track: Shows progress.

    Raises:
        ValueError: If the pipeline is no FLUX.1 text-to-image one, or recipe, pictures and folder do not fit together.
    """
    until = time.monotonic() + 60 * minutes
    if not isinstance(pipeline, FluxPipeline):
        raise ValueError(f"distillation needs a FluxPipeline, not a {type(pipeline).__name__}: name its base model")
    accelerator = _accelerator(recipe, at_once, pipeline)
    if compile:
        pipeline.transformer.compile_repeated_blocks()
    student = Student(pipeline, _settled(recipe, pipeline, request), request.size, start)
    try:
        rows, columns = _grid(pipeline, request)
        shift = noise_shift(pipeline.scheduler, rows * columns) if recipe.levels == "shifted" else 0.0
        noisy = NoisyPairs(pairs or out / "pairs", prompts, recipe.seed, shift)
        with student.teacher():
            made = make_pairs(
                noisy.folder,
                pipeline,
                prompts,
                request,
                pictures=pictures,
                at_once=at_once,
                until=until,
                advance=track("pictures", len(prompts)),
            )
        if not made:
            return False
        if checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        training = Distillation(out, pipeline, student, noisy, accelerator, request, captions, at_once)
        advance = track("distilling", steps)
        for _ in range(min(training.step, steps)):
            advance()
        return training.run(steps, until=until, sample_every=sample_every, advance=advance)
    finally:
        student.finish()


def _accelerator(recipe: Recipe, at_once: int, pipeline: FluxPipeline) -> Accelerator:
    """What shares the work among devices: each takes its part of a batch, `at_once` pictures together."""
    cpu = pipeline.device.type == "cpu"
    devices = PartialState(cpu=cpu).num_processes
    together = devices * at_once
    if recipe.batch % together:
        raise ValueError(
            f"a batch of {recipe.batch} cannot be shared evenly by {devices} x {at_once} pictures "
            f"(devices x --at-once): use --batch {max(1, round(recipe.batch / together)) * together}"
        )
    accelerator = Accelerator(
        cpu=cpu,
        gradient_accumulation_steps=recipe.batch // together,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    if accelerator.distributed_type == DistributedType.FSDP and recipe.optimizer != "adamw":
        raise ValueError("Prodigy cannot measure weights that FSDP has spread over devices: use --optimizer adamw")
    return accelerator


def _settled(recipe: Recipe, pipeline: FluxPipeline, request: Request) -> Recipe:
    """The recipe with a number in place of tiles="auto": the LoRA belongs to it at any size."""
    if not isinstance(recipe.method, HilbertA):
        return recipe
    return replace(recipe, method=replace(recipe.method, tiles=recipe.method.tiles_for(_grid(pipeline, request))))


def _grid(pipeline: FluxPipeline, request: Request) -> tuple[int, int]:
    """(rows, columns) of image tokens."""
    rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in request.size)
    return rows, columns
