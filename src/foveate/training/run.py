# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""A training under way: its steps, and what it leaves in its folder to be gone on with."""

import csv
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained
from foveate.utils.files import write_whole
from foveate.web.report import draw_losses, figure_png

__all__ = ["Run", "Stretch", "cooled", "learn", "shares"]

WORKERS = min(8, os.cpu_count() or 1)  # processes that read pictures and add noise while a GPU computes


class Stretch(NamedTuple):
    """Steps that see samples of one shape.

    Attributes:
        data: The samples by their number.
        samples: Numbers of those that are left to see.
        together: How many a device sees at once.
        times: How often all devices do so for one step.
    """

    data: Dataset[Any]
    samples: range
    together: int
    times: int


def shares(batch: int, devices: int, at_once: int) -> tuple[int, int]:
    """How many samples a device sees at once, and how often, for a batch over all devices.

    Raises:
        ValueError: If they cannot be shared evenly.
    """
    together = devices * at_once
    if batch % together:
        raise ValueError(
            f"a batch of {batch} cannot be shared evenly by {devices} x {at_once} pictures "
            f"(devices x --at-once): use --batch {max(1, round(batch / together)) * together}"
        )
    return at_once, batch // together


def cooled(rate: float, done: float, cool_down: float) -> float:
    """The learning rate when a fraction of the steps is done: over the last part of them it falls to 0, linearly."""
    return rate * min(1.0, (1 - done) / cool_down) if cool_down else rate


def learn(accelerator: Accelerator, model: nn.Module, trained: Trained, loss: Callable[[], Tensor]) -> Tensor:
    """The loss, from which the weights have learned: its gradients are clipped at 1 and the average follows.

    While the accelerator accumulates gradients, weights and average wait for the last of them.
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
        trained.follow()
    return value.detach()


class Run(ABC):
    """A training: what it trains, where it stands, and its folder. A run that is found there is gone on with.

    Args:
        out: Folder of checkpoints, samples, loss.png and log.csv.
        accelerator: Shares the work among devices.
        model: As the accelerator prepared it.
        trained: Its weights, their optimizer and their average.
        settings: What makes the run the run it is.

    Raises:
        ValueError: If `out` holds another run.
    """

    def __init__(
        self, out: Path, accelerator: Accelerator, model: nn.Module, trained: Trained, settings: dict[str, Any]
    ):
        self.out, self.accelerator, self.model, self.trained = out, accelerator, model, trained
        self._settings = settings
        self.step = 0
        self.step = resume(out, self.parts(), settings)
        self._losses = self._read_log()

    # --- what differs from training to training ---

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """What goes into a checkpoint, by name."""

    @abstractmethod
    def stretches(self, steps: int) -> Iterator[Stretch]:
        """What is left to see, until there were so many steps."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """What is to become smaller."""

    @abstractmethod
    def rate(self, done: float) -> float:
        """Learning rate when this fraction of the steps is done."""

    @abstractmethod
    def export(self) -> None:
        """Write the result as it is now into `out`; all devices call it together."""

    @abstractmethod
    def sample(self) -> None:
        """Write a sheet of samples into `out`; all devices call it together."""

    # --- steps ---

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
            advance: Called after every step, first for those of earlier runs.

        Raises:
            ValueError: If the loss is not finite; the checkpoints stay as they were before.
        """
        for _ in range(min(self.step, steps)):
            advance()
        saved = began = time.monotonic()
        for loss in self._steps(steps):
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {self.step} is {loss}: begin anew with a lower --rate")
            now = time.monotonic()
            late, due = self._anywhere(now > until), self._anywhere(now > saved + 60 * checkpoint_minutes)
            last = late or self.step == steps
            self._write_log(loss, now - began)
            advance()
            if last or due:
                self._save()
                saved = now
            if last or (sample_every and self.step % sample_every == 0):
                self.sample()
            began = time.monotonic()
            if late:
                break
        return self.step >= steps

    def _steps(self, steps: int) -> Iterator[float]:
        """The losses of the steps that are left."""
        gpu = self.accelerator.device.type == "cuda"
        for data, samples, together, times in self.stretches(steps):
            loader = DataLoader(data, together, sampler=samples, num_workers=WORKERS if gpu else 0, pin_memory=gpu)
            self.accelerator.gradient_accumulation_steps = times
            losses: list[Tensor] = []
            for batch in self.accelerator.prepare(loader):
                for optimizer in self.trained.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = self.rate(self.step / steps)
                losses.append(learn(self.accelerator, self.model, self.trained, partial(self.loss, batch)))
                if self.accelerator.sync_gradients:
                    self.step += 1
                    yield self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                    losses = []

    def _anywhere(self, here: bool) -> bool:
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag).item())

    # --- what a run leaves behind ---

    def _read_log(self) -> list[float]:
        """The losses up to the checkpoint: the steps after it are made, and logged, again."""
        path = self.out / "log.csv"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)[: self.step]
        if self.accelerator.is_main_process:
            write_whole(path, "".join(lines).encode())
        self.accelerator.wait_for_everyone()
        return [float(loss) for _, loss, _ in csv.reader(lines)]

    def _write_log(self, loss: float, seconds: float) -> None:
        """Step, loss and seconds of every step."""
        self._losses.append(loss)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "log.csv").open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([self.step, f"{loss:.6g}", f"{seconds:.3f}"])

    def _save(self) -> None:
        self.trained.gather()
        self.export()
        if self.accelerator.is_main_process:
            write_checkpoint(self.out, self.step, self.parts(), self._settings)
            write_whole(self.out / "loss.png", figure_png(draw_losses(self._losses)))
        self.accelerator.wait_for_everyone()
