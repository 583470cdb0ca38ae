# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""LoRA distillation: the dense model teaches its sparse version, on its own pictures."""

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
from foveate.training.pairs import make_pairs
from foveate.training.pictures import NoisyLatents, NoisyPairs
from foveate.training.run import Phase, Run, cooled_rate, split_batch
from foveate.training.student import Recipe, Student, token_grid
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.progress import Track, silent

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
    """Make the training pictures, then train the LoRA. Returns whether all steps are done.

    The pipeline keeps the LoRA. An existing run in `out` is resumed.

    Args:
        out: Folder of the run.
        pipeline: Teacher and student.
        recipe: Hyperparameters.
        request: Size, denoising steps, guidance scale and first seed of the teacher's pictures; its prompt is not
            used.
        prompts: Captions, one for each picture.
        pictures: Files of the training pictures; if empty, the teacher draws them.
        pairs: Folder of the latents and text embeddings, which runs may share; None is a folder inside `out`.
        captions: Captions of the samples.
        steps: Number of training steps, including those of earlier runs.
        start: LoRA file to start from.
        at_once: Batch size on a device, for drawing, encoding and training.
        checkpointing: Use gradient checkpointing.
        compile: Compile the repeated blocks: the first step takes a minute longer, the others half the time.
        minutes: Time after which to write a checkpoint and stop.
        sample_every: Steps between sheets of samples; 0 draws one at the end only.
        track: Shows progress.

    Raises:
        ValueError: If the pipeline is not a FLUX.1 text-to-image pipeline, or recipe, pictures and folder do not fit
            together.
    """
    until = time.monotonic() + 60 * minutes
    if not isinstance(pipeline, FluxPipeline):
        raise ValueError(f"distillation needs a FluxPipeline, not a {type(pipeline).__name__}: name its base model")
    accelerator = _accelerator(recipe, at_once, pipeline)
    if compile:
        pipeline.transformer.compile_repeated_blocks()
    rows, columns = token_grid(pipeline, request.size)
    if isinstance(recipe.method, HilbertA):  # replaces tiles="auto": the LoRA belongs to that number at any size
        recipe = replace(recipe, method=replace(recipe.method, tiles=recipe.method.tiles_for((rows, columns))))
    student = Student(pipeline, recipe, request.size, start)
    try:
        shift = noise_shift(pipeline.scheduler, rows * columns) if recipe.levels == "shifted" else 0.0
        noisy = NoisyPairs(pairs or out / "pairs", prompts, recipe.seed, shift)
        with student.teacher():
            complete = make_pairs(
                noisy.folder, pipeline, prompts, request, pictures=pictures, at_once=at_once, until=until,
                advance=track("pictures", len(prompts)),
            )  # fmt: skip
        if not complete:
            return False
        if checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        training = Distillation(out, pipeline, student, noisy, accelerator, request, captions, at_once)
        return training.run(steps, until=until, sample_every=sample_every, advance=track("distilling", steps))
    finally:
        student.finish()


def _accelerator(recipe: Recipe, at_once: int, pipeline: FluxPipeline) -> Accelerator:
    cpu = pipeline.device.type == "cpu"
    split_batch(recipe.batch, PartialState(cpu=cpu).num_processes, at_once)
    accelerator = Accelerator(cpu=cpu, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    if accelerator.distributed_type == DistributedType.FSDP and recipe.optimizer != "adamw":
        raise ValueError("Prodigy cannot measure weights that FSDP has sharded: use --optimizer adamw")
    return accelerator


class Distillation(Run):
    """A distillation run.

    Args:
        out: Folder of the LoRA, checkpoints, samples and log.csv.
        pipeline: Draws the samples.
        student: The student and its recipe.
        pairs: Training samples.
        accelerator: Distributes the work.
        request: Settings of the samples; its size is that of the pairs.
        captions: Captions of the samples.
        at_once: Batch size on a device.

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

    def phases(self, steps: int) -> Iterator[Phase]:
        """The remaining samples."""
        batch = self.student.recipe.batch
        samples = range(self.step * batch, steps * batch)
        if samples:
            yield Phase(self.pairs, samples, *split_batch(batch, self.accelerator.num_processes, self.at_once))

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
        """Draw the captions dense, with the method alone, and distilled. All devices draw, one writes."""
        if not self.captions:
            return
        if not self._references:
            with self.student.teacher():
                self._references["dense"] = self._draw()
            with self.student.without_lora():
                self._references["not distilled"] = self._draw()
        rows = {**self._references, f"{self.step} steps": self._draw()}
        if self.accelerator.is_main_process:
            self.write_sheet(rows, self.captions)

    def _draw(self) -> list[Image.Image]:
        first = self.request.seed + (self.pairs.count or 0)  # seeds that no training picture has used
        requests = [self.request._replace(prompt=c, seed=first + index) for index, c in enumerate(self.captions)]
        parts = [requests[start : start + self.at_once] for start in range(0, len(requests), self.at_once)]
        return [picture for part in parts for picture in draw_batch(self.pipeline, part)]
