# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Training of the transformer and text encoders of the built-in model by flow matching; it can be resumed."""

import csv
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from foveate.demo.scenes import scenes
from foveate.demo.text import TEXT_TOKENS
from foveate.diffusers.pipelines import fingerprint
from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained
from foveate.utils.files import write_picture
from foveate.utils.progress import Track, silent
from lab.training.painter import Latents, Painter, flow_loss
from lab.training.stages import RECIPE, Batches, Stage

__all__ = ["FlowTraining", "Kind", "sample_grid"]

EMA_DECAY = 0.999
SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # not cuDNN: see Painter
WORKERS = 8
LOG_EVERY = 50  # steps
CLOCK_EVERY = 10  # steps between checks of the time, which need communication
STAGE = 10**6  # more steps than any stage has, to store stage and step in one number


class Kind(NamedTuple):
    """What a training run consists of: the trained modules, the latents that they learn, and the data."""

    painter: Callable[[Any], Any]
    latents: Callable[[Any, torch.device], Any]
    batches: Callable[[Stage, Any, int, int, int], Any]


class FlowTraining:
    """A training run of a model that draws pictures; a subclass trains another kind.

    Args:
        out: Folder of checkpoints, sample grids and log.csv. An existing run is resumed.
        pipeline: Pipeline with a trained autoencoder; transformer and text encoders are trained in place.
        initialise: Start from new weights instead of the pipeline's.
        recipe: The stages.
        seed: The same seed, recipe and number of devices give the same run.
        compile: Compile the transformer, once for every size.
    """

    kind: ClassVar[Kind] = Kind(Painter, Latents, Batches)

    def __init__(
        self,
        out: Path,
        pipeline: Any,
        *,
        initialise: bool = True,
        recipe: Sequence[Stage] = RECIPE,
        seed: int = 0,
        compile: bool = False,
    ):
        self.out, self.recipe, self.seed, self.compile = out, tuple(recipe), seed, compile
        self.accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
        self.device = self.accelerator.device
        self.painter = self.kind.painter(pipeline).to(self.device)
        torch.manual_seed(seed)
        if initialise:
            self.painter.initialise()
        self.average = AveragedModel(self.painter, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        self.optimizers = self.painter.optimizers()
        self.latents = self.kind.latents(pipeline, self.device)
        self.pipeline = type(pipeline)(**{**pipeline.components, **self.average.module.parts()})
        self.pipeline.set_progress_bar_config(disable=True)
        self._parts = {"painter": Trained(self.painter, self.optimizers), "average": self.average}
        self._settings = {"recipe": repr(self.recipe), "seed": seed, "devices": self.accelerator.num_processes}
        if not initialise:
            self._settings["start"] = fingerprint(pipeline.transformer)
        self.stage, self.step = divmod(resume(out, self._parts, self._settings), STAGE)
        self.average.module.eval()

    def run(
        self,
        *,
        minutes: float = math.inf,
        checkpoint_minutes: float = 5,
        sample_every: int = 2000,
        workers: int | None = None,
        track: Track = silent,
    ) -> bool:
        """Train until the recipe is done or the time is up. Returns whether the recipe is done.

        Args:
            minutes: Time after which to write a checkpoint and stop.
            checkpoint_minutes: Minutes between checkpoints.
            sample_every: Steps between sample grids; 0 draws none.
            workers: Processes that generate scenes; None is eight, or the number of cores if that is less.
            track: Shows progress, stage by stage.
        """
        began = saved = time.monotonic()
        workers = min(WORKERS, os.cpu_count() or 0) if workers is None else workers
        if self.compile:
            self.painter.transformer.compile(dynamic=False)
        model = self.accelerator.prepare(self.painter).train()
        for stage in self.recipe[self.stage :]:
            steps = stage.steps(self.accelerator.num_processes)
            advance = track(stage.name, steps)
            for _ in range(self.step):
                advance()
            self._losses, self._began = [], time.monotonic()
            for loss in self._steps(stage, model, workers):
                advance()
                now, asked = time.monotonic(), self.step % CLOCK_EVERY == 0
                late = asked and self._on_any_process(now > began + 60 * minutes)
                due = asked and self._on_any_process(now > saved + 60 * checkpoint_minutes)
                last = late or self.step == steps
                self._log(stage, loss, last)
                if sample_every and (last or self.step % sample_every == 0):
                    self._sample(stage)
                if self.step == steps:
                    self.stage, self.step = self.stage + 1, 0
                if last or due:
                    self._save()
                    saved = now
                if late:
                    return self.stage == len(self.recipe)
        return True

    def minutes(self) -> float:
        """Minutes of all steps so far, from the log."""
        total, before = 0.0, 0
        for _, step, _, seconds in csv.reader((self.out / "log.csv").read_text().splitlines()):
            total += (int(step) - before if int(step) > before else int(step)) * float(seconds)
            before = int(step)
        return total / 60

    def _steps(self, stage: Stage, model: nn.Module, workers: int) -> Iterator[Tensor]:
        """The losses of the remaining steps of a stage."""
        index, devices = self.accelerator.process_index, self.accelerator.num_processes
        batches = self.kind.batches(stage, self.pipeline, self.seed, index, devices)
        left = range(self.step, len(batches))
        loader = DataLoader(
            batches, batch_size=None, sampler=left, num_workers=workers, prefetch_factor=4 if workers else None
        )
        generator = torch.Generator(self.device)
        for step, batch in zip(left, loader, strict=True):
            generator.manual_seed(hash((self.seed, self.stage, step, index)) % 2**62)
            rare = batch.text[-1].shape[1] > TEXT_TOKENS  # not worth compiling
            with torch.compiler.set_stance("force_eager" if rare else "default"), sdpa_kernel(SDPA):
                loss = flow_loss(model, self.latents, batch.to(self.device), generator)
                self.accelerator.backward(loss)
            nn.utils.clip_grad_norm_(self.painter.parameters(), 1.0)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stage.rate(step, len(batches))
                optimizer.step()
                optimizer.zero_grad()
            self.average.update_parameters(self.painter)
            self.step = step + 1
            yield loss.detach()

    def _on_any_process(self, here: bool) -> bool:
        flag = torch.tensor(float(here), device=self.device)
        return bool(self.accelerator.reduce(flag).item())

    def _log(self, stage: Stage, loss: Tensor, last: bool) -> None:
        """Write stage, step, mean loss and mean seconds to log.csv every `LOG_EVERY` steps."""
        self._losses.append(loss)
        if self.accelerator.is_main_process and (last or len(self._losses) == LOG_EVERY):
            mean = torch.stack(self._losses).mean().item()
            seconds = (time.monotonic() - self._began) / len(self._losses)
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "log.csv").open("a", newline="") as file:
                csv.writer(file).writerow([stage.name, self.step, f"{mean:.5f}", f"{seconds:.4f}"])
        if last or len(self._losses) == LOG_EVERY:
            self._losses, self._began = [], time.monotonic()

    def _sample(self, stage: Stage) -> None:
        if self.accelerator.is_main_process:
            with torch.compiler.set_stance("force_eager"):
                grid = self._sheet(stage)
            write_picture(self.out / f"{self.stage}-{stage.name}-{self.step:06}.png", grid, {})

    def _sheet(self, stage: Stage) -> Image.Image:
        return sample_grid(self.pipeline, max(stage.batches))

    def _save(self) -> None:
        write_checkpoint(self.out, self.stage * STAGE + self.step, self._parts, self._settings)


@torch.no_grad()
def sample_grid(pipeline: FluxPipeline, side: int, count: int = 16, steps: int = 20, seed: int = 0) -> Image.Image:
    """Pictures of held-out captions in a grid of four columns."""
    captions = [scene.caption for scene in itertools.islice(scenes(seed, evaluation=True), count)]
    generators = [torch.Generator("cpu").manual_seed(seed + index) for index in range(count)]
    size = {"height": side, "width": side, "max_sequence_length": TEXT_TOKENS}
    pictures = pipeline(captions, generator=generators, num_inference_steps=steps, **size).images
    grid = Image.new("RGB", (4 * side, -(-count // 4) * side))
    for index, picture in enumerate(pictures):
        grid.paste(picture, (index % 4 * side, index // 4 * side))
    return grid
