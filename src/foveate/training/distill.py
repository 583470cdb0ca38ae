# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""LoRA distillation: the dense model teaches its sparse self, from its own pictures."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DataLoaderConfiguration
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor

from foveate.diffusers.lora import LORA_FILE
from foveate.diffusers.pipelines import Request, draw_batch, fingerprint, noise_shift
from foveate.methods import HilbertA
from foveate.training.pairs import Noisy, NoisyPairs, make_pairs
from foveate.training.run import Run, Stretch, shares
from foveate.training.student import Recipe, Student
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.progress import Track, silent
from foveate.web.report import draw_sheet, figure_png

__all__ = ["Distillation", "distill"]


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
    track: Track = silent,
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
        return training.run(steps, until=until, sample_every=sample_every, advance=track("distilling", steps))
    finally:
        student.finish()


def _accelerator(recipe: Recipe, at_once: int, pipeline: FluxPipeline) -> Accelerator:
    """What shares the work among devices: each takes its part of a batch, `at_once` pictures together."""
    cpu = pipeline.device.type == "cpu"
    shares(recipe.batch, PartialState(cpu=cpu).num_processes, at_once)
    accelerator = Accelerator(cpu=cpu, dataloader_config=DataLoaderConfiguration(non_blocking=True))
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


class Distillation(Run):
    """A run of a recipe.

    Args:
        out: Folder of the LoRA, checkpoints, samples and log.csv.
        pipeline: Draws the samples.
        student: Is trained.
        pairs: What it sees.
        accelerator: Shares the work among devices.
        request: How samples are drawn; its size is that of the pairs.
        captions: Of the samples.
        at_once: Pictures that a device sees, or draws, together.

    Raises:
        ValueError: If `out` holds another run.
    """

    def __init__(
        self,
        out: Path,
        pipeline: FluxPipeline,
        student: Student,
        pairs: NoisyPairs,
        accelerator: Accelerator,
        request: Request,
        captions: Sequence[str],
        at_once: int,
    ):
        self.pipeline, self.student, self.pairs = pipeline, student, pairs
        self.request, self.captions, self.at_once = request, captions, at_once
        self._references: dict[str, list[Image.Image]] = {}
        settings = {
            "recipe": repr(student.recipe),
            "start": f"{crc32(student.start.read_bytes()):08x}" if student.start else "",
            "weights": fingerprint(pipeline.transformer),
            "prompts": pairs.checksum,
        }
        optimizer = student.recipe.optimizer_of(student.trained)
        model, optimizer = accelerator.prepare(pipeline.transformer, optimizer)
        super().__init__(out, accelerator, model, Trained(student.trained, [optimizer]), settings)

    def parts(self) -> dict[str, Trained]:
        """The LoRA and its optimizer."""
        return {"lora": self.trained}

    def stretches(self, steps: int) -> Iterator[Stretch]:
        """All samples that are left."""
        batch = self.student.recipe.batch
        samples = range(self.step * batch, steps * batch)
        if samples:
            yield Stretch(self.pairs, samples, *shares(batch, self.accelerator.num_processes, self.at_once))

    def loss(self, batch: Noisy) -> Tensor:
        """The student's."""
        return self.student.loss(self.model, batch)

    def rate(self, done: float) -> float:
        """The recipe's."""
        return self.student.recipe.rate_at(done)

    def export(self) -> None:
        """The LoRA."""
        lora = self.student.packed()
        if self.accelerator.is_main_process:
            write_whole(self.out / LORA_FILE, lora)

    def sample(self) -> None:
        """The captions drawn dense, with the method alone, and distilled. All devices draw, one writes."""
        if not self.captions:
            return
        if not self._references:
            with self.student.teacher():
                self._references["dense"] = self._draw()
            with self.student.untaught():
                self._references["not distilled"] = self._draw()
        rows = {**self._references, f"{self.step} steps": self._draw()}
        if self.accelerator.is_main_process:
            sheet = draw_sheet(rows, list(self.captions))
            write_whole(self.out / f"samples-{self.step:06}.png", figure_png(sheet, dpi=100))

    def _draw(self) -> list[Image.Image]:
        first = self.request.seed + self.pairs.count  # noise that no picture of the training began with
        requests = [
            self.request._replace(prompt=caption, seed=first + index) for index, caption in enumerate(self.captions)
        ]
        parts = [requests[start : start + self.at_once] for start in range(0, len(requests), self.at_once)]
        return [picture for part in parts for picture in draw_batch(self.pipeline, part)]
