# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""LoRA distillation: the dense model teaches its sparse version, on its own images."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from zlib import crc32

from accelerate import Accelerator
from diffusers import FluxPipeline, WanPipeline
from PIL import Image
from torch import Tensor

from foveate.methods import HilbertA
from foveate.pipelines.lora import LORA_FILE
from foveate.pipelines.request import Request, draw_batch, fingerprint, makes_video
from foveate.training.families import family_of
from foveate.training.pairs import make_pairs
from foveate.training.pictures import NoisyLatents, NoisyPairs, noise_shift
from foveate.training.run import Phase, Run, RunOptions, cooled_rate, make_accelerator, split_batch
from foveate.training.student import Recipe, Student
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.processes import check_shared

__all__ = ["Distillation", "distill"]


def distill(
    out: Path,
    pipeline: FluxPipeline | WanPipeline,
    recipe: Recipe,
    request: Request,
    prompts: Sequence[str],
    *,
    pictures: Sequence[Path] = (),
    pairs: Path | None = None,
    steps: int,
    start: Path | None = None,
    options: RunOptions,
) -> bool:
    """Make the training images, then train the LoRA. Returns whether all steps are done.

    The pipeline keeps the LoRA. An existing run in `out` is resumed.

    Args:
        out: Folder of the run.
        pipeline: Teacher and student.
        recipe: Hyperparameters.
        request: Size, frames, denoising steps, guidance scale and first seed of the teacher's images or videos. The
            prompt is not used.
        prompts: Captions, one for each image.
        pictures: Files of the training images; if empty, the teacher generates them.
        pairs: Folder of the latents and text embeddings, which runs may share; None is a folder inside `out`.
        steps: Number of training steps, including earlier runs.
        start: LoRA file to start from.
        options: Other settings. `at_once` applies to generating, encoding and training.

    Raises:
        ValueError: If the pipeline is neither FLUX.1, text to image, nor Wan with one transformer, text to video, or
            recipe, images and folder do not fit together.
    """
    until = time.monotonic() + 60 * options.minutes
    grid = family_of(pipeline, request).grid
    accelerator = make_accelerator(pipeline.device, recipe.optimizer)
    split_batch(recipe.batch, accelerator.num_processes)
    check_shared(out)
    if options.compile:
        pipeline.transformer.compile_repeated_blocks()
    if isinstance(recipe.method, HilbertA):  # the LoRA belongs to these tiles at any size
        recipe = replace(recipe, method=recipe.method.chosen_for(grid))
    student = Student(pipeline, recipe, request, start)
    try:
        shift = noise_shift(pipeline.scheduler, prod(grid)) if recipe.levels == "shifted" else 0.0
        noisy = NoisyPairs(pairs or out / "pairs", prompts, recipe.seed, shift)
        with student.teacher():
            complete = make_pairs(
                noisy.folder, pipeline, prompts, request, pictures=pictures, at_once=options.at_once, until=until,
                advance=options.track("images", len(prompts)),
            )  # fmt: skip
        if not complete:
            return False
        if options.checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        training = Distillation(out, pipeline, student, noisy, accelerator, request, options)
        return training.run(steps, "distilling", until)
    finally:
        student.finish()


class Distillation(Run):
    """A distillation run.

    Args:
        out: Folder of the LoRA, checkpoints, samples and log.csv.
        pipeline: Generates the samples.
        student: The student and its recipe.
        pairs: Training samples.
        accelerator: Distributes the work.
        request: Settings of the samples, with the size of the pairs.
        options: Other settings.

    Raises:
        ValueError: If `out` holds another run.
    """

    def __init__(
        self,
        out: Path,
        pipeline: FluxPipeline | WanPipeline,
        student: Student,
        pairs: NoisyPairs,
        accelerator: Accelerator,
        request: Request,
        options: RunOptions,
    ):
        self.pipeline, self.student, self.pairs, self.request = pipeline, student, pairs, request
        self._references: dict[str, list[Image.Image]] = {}
        settings = {
            "recipe": repr(student.recipe),
            "start": f"{crc32(student.start.read_bytes()):08x}" if student.start else "",
            "weights": fingerprint(pipeline.transformer),
            "prompts": pairs.checksum,
        }
        optimizer = student.recipe.optimizer_of(student.trained)
        model, optimizer = accelerator.prepare(pipeline.transformer, optimizer)
        super().__init__(out, accelerator, model, Trained(model, [optimizer]), settings, options)

    def parts(self) -> dict[str, Trained]:
        """The LoRA and its optimizer."""
        return {"lora": self.trained}

    def phases(self, steps: int) -> Iterator[Phase]:
        """Phases with the remaining samples."""
        batch = self.student.recipe.batch
        samples = range(self.step * batch, steps * batch)
        if samples:
            yield Phase(self.pairs, samples, *split_batch(batch, self.accelerator.num_processes, self.options.at_once))

    def loss(self, batch: NoisyLatents) -> Tensor:
        """The loss of the student."""
        return self.student.loss(self.model, batch)

    def rate(self, done: float) -> float:
        """The learning rate of the recipe."""
        recipe = self.student.recipe
        return cooled_rate(recipe.first_rate, done, recipe.cool_down)

    def export(self) -> None:
        """Write the LoRA."""
        lora = self.student.lora_file()
        if self.accelerator.is_main_process:
            write_whole(self.out / LORA_FILE, lora)

    def sample(self) -> None:
        """Write a sheet of samples: dense, with the method only, and distilled; of a video, the middle frame.

        All devices generate, one writes.
        """
        if not self.options.captions:
            return
        if not self._references:
            with self.student.teacher():
                self._references["dense"] = self._draw()
            with self.student.without_lora():
                self._references["not distilled"] = self._draw()
        rows = {**self._references, f"{self.step} steps": self._draw()}
        if self.accelerator.is_main_process:
            self.write_sheet(rows, self.options.captions)

    def _draw(self) -> list[Image.Image]:
        first = self.request.seed + (self.pairs.count or 0)  # seeds that no training image uses
        at_once, captions = self.options.at_once, self.options.captions
        requests = [self.request._replace(prompt=c, seed=first + index) for index, c in enumerate(captions)]
        parts = [requests[start : start + at_once] for start in range(0, len(requests), at_once)]
        drawn = [one for part in parts for one in draw_batch(self.pipeline, part)]
        return [one[len(one) // 2] for one in drawn] if makes_video(self.pipeline) else drawn
