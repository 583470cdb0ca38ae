# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""LoRA distillation: the dense model teaches its sparse self, in a run that can be broken off and gone on with."""

import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch
from accelerate import Accelerator, PartialState
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foveate.files import write_whole
from foveate.integrations.diffusers.lora import LORA_FILE
from foveate.integrations.diffusers.pipelines import Request, draw, fingerprint
from foveate.methods import HilbertA
from foveate.report import draw_losses, draw_sheet, figure_png
from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.pairs import NoisyPairs, make_pairs
from foveate.training.student import Recipe, Student

__all__ = ["Distillation", "distill"]


def distill(
    out: Path,
    pipeline: FluxPipeline,
    recipe: Recipe,
    request: Request,
    prompts: Sequence[str],
    *,
    pictures: Sequence[Path] = (),
    captions: Sequence[str] = (),
    steps: int,
    start: Path | None = None,
    at_once: int = 1,
    checkpointing: bool = False,
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
        captions: Of the samples.
        steps: How many there are to be, with those of earlier runs.
        start: The LoRA to begin with.
        at_once: Pictures that a device sees together.
        checkpointing: Run layers again in the backward pass, to save memory.
        minutes: When to write a checkpoint and stop.
        sample_every: Steps between sheets of samples; 0 draws one at the end alone.
        track: Shows progress.

    Raises:
        ValueError: If the pipeline is no FLUX.1 text-to-image one, or recipe, pictures and folder do not fit together.
    """
    until = time.monotonic() + 60 * minutes
    if not isinstance(pipeline, FluxPipeline):
        raise ValueError(f"distillation needs a FluxPipeline, not a {type(pipeline).__name__}: name its base model")
    if isinstance(recipe.method, HilbertA):  # the LoRA belongs to this number of tiles, at any size
        rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in request.size)
        recipe = replace(recipe, method=replace(recipe.method, tiles=recipe.method.tiles_for((rows, columns))))
    advance = track("pictures", len(prompts))
    pairs = NoisyPairs(out / "pairs", prompts, recipe.seed)
    if not make_pairs(pairs.folder, pipeline, prompts, request, pictures=pictures, until=until, advance=advance):
        return False
    training = Distillation(
        out, pipeline, pairs, recipe, request=request, captions=captions, start=start, at_once=at_once,
        checkpointing=checkpointing,
    )  # fmt: skip
    advance = track("distilling", steps)
    for _ in range(min(training.step, steps)):
        advance()
    try:
        return training.run(steps, until=until, sample_every=sample_every, advance=advance)
    finally:
        training.student.finish()


class Distillation:
    """A run of a recipe: what it trains, where it stands, and its folder.

    Args:
        out: Folder of the LoRA, checkpoints, samples and log.csv. A run that is found there is gone on with.
        pipeline: Teacher and student.
        pairs: What they see.
        recipe: How the student learns.
        request: How samples are drawn; its size is that of the pairs.
        captions: Of the samples.
        start: The LoRA to begin with.
        at_once: Pictures that a device sees together.
        checkpointing: Run layers again in the backward pass, to save memory.

    Raises:
        ValueError: If the batch cannot be shared evenly, or `out` holds another run; also see `Student`.
    """

    def __init__(
        self,
        out: Path,
        pipeline: FluxPipeline,
        pairs: NoisyPairs,
        recipe: Recipe,
        *,
        request: Request,
        captions: Sequence[str] = (),
        start: Path | None = None,
        at_once: int = 1,
        checkpointing: bool = False,
    ):
        self.out, self.pipeline, self.pairs, self.recipe = out, pipeline, pairs, recipe
        self.request, self.captions, self.at_once = request, captions, at_once
        self.accelerator = _accelerator(recipe.batch, at_once, pipeline.device.type == "cpu")
        settings = {
            "recipe": repr(recipe),
            "weights": fingerprint(pipeline.transformer),
            "prompts": pairs.checksum,
            "start": f"{crc32(start.read_bytes()):08x}" if start else "",
        }
        self.student = Student(pipeline, recipe, request.size, start)
        if checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        optimizer = recipe.optimizer_of(self.student.trained)
        self.model, self.optimizer = self.accelerator.prepare(pipeline.transformer, optimizer)
        self.lora = nn.ParameterList(self.student.trained)
        self._parts, self._settings = {"lora": self.lora, "optimizer": self.optimizer}, settings
        self.step = resume(out, self._parts, settings)
        self._log = self._read_log()
        self._references: dict[str, list[Image.Image]] = {}

    def run(
        self,
        steps: int,
        *,
        until: float = math.inf,
        checkpoint_minutes: float = 5,
        sample_every: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> bool:
        """Train until there were so many steps or the time is up; whether all were made.

        Args:
            steps: How many there are to be, with those of earlier runs.
            until: When to write a checkpoint and stop, by `time.monotonic`.
            checkpoint_minutes: Time between checkpoints.
            sample_every: Steps between sheets of samples; 0 draws one at the end alone.
            advance: Called after every step.
        """
        saved = began = time.monotonic()
        for loss in self._steps(steps):
            now = time.monotonic()
            late, due = self._anywhere(now > until), self._anywhere(now > saved + 60 * checkpoint_minutes)
            last = late or self.step == steps
            self._write_log(loss, now - began)
            advance()
            if last or due:
                self._save()
                saved = now
            if last or (sample_every and self.step % sample_every == 0):
                self._sample()
            began = time.monotonic()
            if late:
                break
        return self.step >= steps

    def _steps(self, steps: int) -> Iterator[float]:
        """The losses of the steps that are left."""
        samples = range(self.step * self.recipe.batch, steps * self.recipe.batch)
        if not samples:
            return
        loader = self.accelerator.prepare(DataLoader(self.pairs, batch_size=self.at_once, sampler=samples))
        losses: list[Tensor] = []
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                loss = self.student.loss(self.model, batch)
                self.accelerator.backward(loss)
                losses.append(loss.detach())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.lora, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.step += 1
                yield self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                losses = []

    def _anywhere(self, here: bool) -> bool:
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag).item())

    # --- what a run leaves behind ---

    def _read_log(self) -> list[list[str]]:
        """The steps up to the checkpoint: those after it are made again."""
        path = self.out / "log.csv"
        rows = list(csv.reader(path.read_text().splitlines())) if path.exists() else []
        return [row for row in rows if int(row[0]) <= self.step]

    def _write_log(self, loss: float, seconds: float) -> None:
        """Step, loss and seconds of every step."""
        self._log.append([str(self.step), f"{loss:.6g}", f"{seconds:.3f}"])
        if self.accelerator.is_main_process:
            write_whole(self.out / "log.csv", "".join(",".join(row) + "\n" for row in self._log).encode())

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            write_checkpoint(self.out, self.step, self._parts, self._settings)
            write_whole(self.out / LORA_FILE, self.student.packed())
            losses = draw_losses([float(loss) for _, loss, _ in self._log])
            write_whole(self.out / "loss.png", figure_png(losses))
        self.accelerator.wait_for_everyone()

    def _sample(self) -> None:
        """A sheet: the captions drawn dense, with the method alone, and distilled. All devices draw, one writes."""
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

    def _draw(self) -> list:
        requests = (
            self.request._replace(prompt=text, seed=self.request.seed + i) for i, text in enumerate(self.captions)
        )
        return [draw(self.pipeline, request) for request in requests]


def _accelerator(batch: int, at_once: int, cpu: bool) -> Accelerator:
    """What shares the work among devices: each takes a batch in as many parts as it needs."""
    together = PartialState(cpu=cpu).num_processes * at_once
    if batch % together:
        raise ValueError(
            f"a batch of {batch} cannot be shared evenly by {together // at_once} devices with {at_once} pictures "
            f"at once: use --batch {max(1, round(batch / together)) * together}"
        )
    return Accelerator(cpu=cpu, gradient_accumulation_steps=batch // together)
