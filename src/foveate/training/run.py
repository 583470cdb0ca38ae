# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""A resumable training run: its steps, checkpoints, log and samples."""

import csv
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from foveate.plots.figures import draw_losses, draw_sheet, figure_png
from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.utils.progress import Track, silent

__all__ = [
    "Phase",
    "Run",
    "RunOptions",
    "cooled_rate",
    "make_accelerator",
    "split_batch",
    "train_step",
]

WORKERS = min(8, os.cpu_count() or 1)  # processes that prepare samples while a GPU computes


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a training run that do not change its result, up to rounding.

    Attributes:
        at_once: Largest batch on a device.
        checkpointing: Use gradient checkpointing.
        compile: Compile the repeated blocks, once for each size.
        minutes: Time after which to write a checkpoint and stop.
        checkpoint_minutes: Time between checkpoints.
        captions: Captions of the samples; "" for each sample of a model without captions.
        sample_every: Steps between sheets of samples; 0 generates one at the end only.
        track: Shows progress.
    """

    at_once: int
    checkpointing: bool = False
    compile: bool = False
    minutes: float = math.inf
    checkpoint_minutes: float = 5
    captions: Sequence[str] = ()
    sample_every: int = 0
    track: Track = silent


class Phase(NamedTuple):
    """Consecutive steps whose samples have one shape.

    Attributes:
        data: The samples by number.
        samples: Numbers of the remaining samples.
        micro_batch: Samples that a device processes at once.
        accumulation: Micro-batches of each device in a step.
        collate: Makes a micro-batch of a list of samples; None stacks their tensors.
    """

    data: Dataset[Any]
    samples: range
    micro_batch: int
    accumulation: int
    collate: Callable[[list[Any]], Any] | None = None


def split_batch(batch: int, devices: int, at_once: int = 1) -> tuple[int, int]:
    """Size of a device's micro-batch, and number of micro-batches to accumulate.

    Args:
        batch: Batch size over all devices.
        devices: Number of devices.
        at_once: Largest micro-batch of a device.

    Raises:
        ValueError: If the batch cannot be split evenly.
    """
    share, rest = divmod(batch, devices)
    if rest:
        nearest = " or ".join(str(size) for size in (batch - rest, batch - rest + devices) if size)
        raise ValueError(f"{devices} processes cannot share a batch of {batch} evenly: use {nearest}")
    micro_batch = next(size for size in range(min(at_once, share), 0, -1) if share % size == 0)
    return micro_batch, share // micro_batch


def make_accelerator(device: torch.device, optimizer: str, mixed_precision: str | None = None) -> Accelerator:
    """The accelerator of a run on this kind of device.

    Raises:
        ValueError: If FSDP shards the weights, and the optimizer is not AdamW.
    """
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    if accelerator.distributed_type == DistributedType.FSDP and optimizer != "adamw":
        raise ValueError(f"{optimizer} needs whole weights, but FSDP has sharded them: use the optimizer adamw")
    return accelerator


def cooled_rate(rate: float, done: float, cool_down: float) -> float:
    """The learning rate after a fraction `done` of the steps; it falls linearly to 0 over the last `cool_down`."""
    return rate * min(1.0, (1 - done) / cool_down) if cool_down else rate


def train_step(accelerator: Accelerator, model: nn.Module, trained: Trained, loss: Callable[[], Tensor]) -> Tensor:
    """Take an optimizer step, with gradients clipped to norm 1, and update the average; returns the loss.

    With gradient accumulation, weights and average change after the last micro-batch.
    """
    with accelerator.accumulate(model):
        value = loss()
        accelerator.backward(value)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(trained.weights, 1.0)
        for optimizer in trained.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.sync_gradients:
        trained.update_average()
    return value.detach()


class Run(ABC):
    """A training run in a folder, resumed from the checkpoints in it.

    Args:
        out: Folder of checkpoints, samples, loss.png and log.csv.
        accelerator: Distributes the work.
        model: The model as the accelerator prepared it.
        trained: Its weights, with their optimizers and their average.
        settings: Settings that identify the run.
        options: Other settings.

    Raises:
        ValueError: If `out` holds another run.
    """

    def __init__(
        self,
        out: Path,
        accelerator: Accelerator,
        model: nn.Module,
        trained: Trained,
        settings: dict[str, Any],
        options: RunOptions,
    ):
        self.out, self.accelerator, self.model, self.trained = out, accelerator, model, trained
        self._settings, self.options = settings, options
        self.step = 0
        self.step = resume(out, self.parts(), settings)
        self._losses = self._read_log()

    # --- what a subclass defines ---

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """The parts of a checkpoint, by name."""

    @abstractmethod
    def phases(self, steps: int) -> Iterator[Phase]:
        """The remaining phases of a run of this many steps."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of a micro-batch."""

    @abstractmethod
    def rate(self, done: float) -> float:
        """The learning rate after this fraction of the steps."""

    @abstractmethod
    def export(self) -> None:
        """Write the current result into `out`; called on all devices together."""

    @abstractmethod
    def sample(self) -> None:
        """Write a sheet of samples into `out`; called on all devices together."""

    # --- steps ---

    def run(self, steps: int, name: str = "training", until: float | None = None) -> bool:
        """Train up to a number of steps or until the time is up. Returns whether all steps are done.

        Args:
            steps: Number of steps, including earlier runs.
            name: Name of the progress bar.
            until: Time at which to write a checkpoint and stop, as given by `time.monotonic`. None: `options.minutes`
                from now.

        Raises:
            ValueError: If the loss is not finite; the checkpoints keep the state before.
        """
        options, advance = self.options, self.options.track(name, steps)
        for _ in range(min(self.step, steps)):
            advance()
        saved = began = time.monotonic()
        until = began + 60 * options.minutes if until is None else until
        for loss in self.losses(steps):
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {self.step} is {loss}: start again with a lower learning rate")
            now = time.monotonic()
            late, due = self._on_any_device(now > until, now > saved + 60 * options.checkpoint_minutes)
            last = late or self.step == steps
            self._write_log(loss, now - began)
            advance()
            if last or due:
                self._save()
                saved = now
            if last or (options.sample_every and self.step % options.sample_every == 0):
                self.sample()
            began = time.monotonic()
            if late:
                break
        return self.step >= steps

    def losses(self, steps: int) -> Iterator[float]:
        """Train up to a number of steps, without files; yields the loss of each, equal on all devices."""
        gpu = self.accelerator.device.type == "cuda"
        for data, samples, micro_batch, accumulation, collate in self.phases(steps):
            loader = DataLoader(
                data, micro_batch, sampler=samples, num_workers=WORKERS if gpu else 0, collate_fn=collate,
                pin_memory=gpu,
            )  # fmt: skip
            self.accelerator.gradient_accumulation_steps = accumulation
            losses: list[Tensor] = []
            for batch in self.accelerator.prepare(loader):
                for optimizer in self.trained.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = self.rate(self.step / steps)
                losses.append(train_step(self.accelerator, self.model, self.trained, partial(self.loss, batch)))
                if self.accelerator.sync_gradients:
                    self.step += 1
                    yield self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                    losses = []

    def _on_any_device(self, *here: bool) -> list[bool]:
        flags = torch.tensor(here, dtype=torch.float32, device=self.accelerator.device)
        return self.accelerator.reduce(flags).bool().tolist()

    # --- files ---

    def write_sheet(self, rows: dict[str, list[Image.Image]], captions: Sequence[str]) -> None:
        """Write a sheet of samples, named after the current step: a row for each name, a column for each caption."""
        sheet = figure_png(draw_sheet(rows, list(captions)), dpi=100)
        write_whole(self.out / f"samples-{self.step:06}.png", sheet)

    def _read_log(self) -> list[float]:
        """The losses up to the checkpoint; later lines are removed, because their steps are repeated."""
        path = self.out / "log.csv"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)[: self.step]
        if self.accelerator.is_main_process:
            write_whole(path, "".join(lines).encode())
        self.accelerator.wait_for_everyone()
        return [float(loss) for _, loss, _ in csv.reader(lines)]

    def _write_log(self, loss: float, seconds: float) -> None:
        """Append step, loss and seconds."""
        self._losses.append(loss)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "log.csv").open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([self.step, f"{loss:.6g}", f"{seconds:.3f}"])

    def _save(self) -> None:
        self.export()
        write_checkpoint(self.out, self.step, self.parts(), self._settings)
        if self.accelerator.is_main_process:
            write_whole(self.out / "loss.png", figure_png(draw_losses(self._losses)))
        self.accelerator.wait_for_everyone()
