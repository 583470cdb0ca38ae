# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""A distillation under way: its steps, and what it leaves in its folder to be gone on with."""

import csv
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import torch
from accelerate import Accelerator
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from foveate.files import write_whole
from foveate.integrations.diffusers.lora import LORA_FILE
from foveate.integrations.diffusers.pipelines import Request, draw_batch, fingerprint
from foveate.report import draw_losses, draw_sheet, figure_png
from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.pairs import NoisyPairs
from foveate.training.student import Student
from foveate.training.trained import Trained

__all__ = ["Distillation"]

WORKERS = min(4, os.cpu_count() or 1)  # processes that read pictures and add noise while a GPU computes


class Distillation:
    """A run of a recipe: what it trains, where it stands, and its folder.

    Args:
        out: Folder of the LoRA, checkpoints, samples and log.csv. A run that is found there is gone on with.
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
        self.out, self.pipeline, self.student, self.pairs = out, pipeline, student, pairs
        self.accelerator, self.request, self.captions, self.at_once = accelerator, request, captions, at_once
        self._settings = {
            "recipe": repr(student.recipe),
            "start": f"{crc32(student.start.read_bytes()):08x}" if student.start else "",
            "weights": fingerprint(pipeline.transformer),
            "prompts": pairs.checksum,
        }
        optimizer = student.recipe.optimizer_of(student.trained)
        self.model, self.optimizer = accelerator.prepare(pipeline.transformer, optimizer)
        self.trained = Trained(student.trained, self.optimizer)
        self.step = resume(out, {"lora": self.trained}, self._settings)
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
        samples = range(self.step * self.student.recipe.batch, steps * self.student.recipe.batch)
        if not samples:
            return
        gpu = self.accelerator.device.type == "cuda"
        loader = DataLoader(
            self.pairs, self.at_once, sampler=samples, num_workers=WORKERS if gpu else 0, pin_memory=gpu
        )
        losses: list[Tensor] = []
        for batch in self.accelerator.prepare(loader):
            for group in self.optimizer.param_groups:
                group["lr"] = self.student.recipe.rate_at(self.step / steps)
            with self.accelerator.accumulate(self.model):
                loss = self.student.loss(self.model, batch)
                self.accelerator.backward(loss)
                losses.append(loss.detach())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained.weights, 1.0)
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
        self.trained.gather()
        lora = self.student.packed()
        if self.accelerator.is_main_process:
            write_checkpoint(self.out, self.step, {"lora": self.trained}, self._settings)
            write_whole(self.out / LORA_FILE, lora)
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

    def _draw(self) -> list[Image.Image]:
        first = self.request.seed + self.pairs.count  # noise that no picture of the training began with
        requests = [
            self.request._replace(prompt=caption, seed=first + index) for index, caption in enumerate(self.captions)
        ]
        parts = [requests[start : start + self.at_once] for start in range(0, len(requests), self.at_once)]
        return [picture for part in parts for picture in draw_batch(self.pipeline, part)]
