# pyright: basic
"""Replicas of the image service: each holds a pipeline and generates in batches."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

from ray import serve

from foveate.diffusers.apply import apply
from foveate.pipelines.checks import check_request
from foveate.pipelines.image_files import png
from foveate.pipelines.lora import Distilled, MethodLike, load_lora, using
from foveate.pipelines.pixel import PixelPipeline, as_method
from foveate.pipelines.request import Request, draw_batch, load_pipeline, makes_video, own_size, quiet, unread

__all__ = ["ImageReplica", "Job", "ServedPipeline"]


class _Abandoned(Exception):
    """The clients of all images of a batch have left."""


@dataclass
class Job:
    """An image to generate.

    Attributes:
        request: Prompt, size, steps, guidance scale and seed.
        result: PNG file, or the error message; empty until done.
        abandoned: Whether its client has left.
    """

    request: Request
    result: bytes | str = ""
    abandoned: bool = False


class ServedPipeline:
    """One pipeline with one method set.

    `last_step` is the time of the last denoising step, None between images.

    Args:
        model: Folder or hub id of the pipeline.
        method: Method; None is dense.
        about: Metadata of every image.
        lora: File of a LoRA.
        size: Default (height, width) in pixels; None is the model's own.
        device: See `foveate.utils.device.choose_device`.
        dtype: See `foveate.utils.device.choose_dtype`.

    Raises:
        ValueError: If the pipeline cannot be loaded or makes videos.
    """

    def __init__(
        self,
        model: str,
        method: MethodLike | None,
        about: dict[str, str],
        *,
        lora: Path | None = None,
        size: tuple[int, int] | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        quiet()
        self._pipe = load_pipeline(model, device, dtype)
        if makes_video(self._pipe):
            raise ValueError(f"{model} makes videos, and only images are served: generate with foveate generate")
        if lora:
            load_lora(self._pipe, lora)
        if method is None:
            if isinstance(self._pipe, PixelPipeline):
                as_method(self._pipe)  # its own attention is not dense
        elif isinstance(method, Distilled):
            self._applied = using(self._pipe, method)
            self._applied.__enter__()
        else:
            self._applied = apply(self._pipe, method)
        self._size, self._about = size or own_size(self._pipe), about
        self.last_step: float | None = None

    def job(self, prompt: str, size: tuple[int, int] | None, steps: int, seed: int) -> Job:
        """Job of a request; an invalid request has its error as result already."""
        job = Job(Request(prompt, size or self._size, steps, None, seed))
        try:
            check_request(self._pipe, job.request)
        except ValueError as error:
            job.result = str(error)
        return job

    def draw_together(self, jobs: Sequence[Job]) -> None:
        """Generate images in batches of one size and number of steps; stop when all clients have left."""

        def go_on() -> None:
            self.last_step = monotonic()
            if all(job.abandoned for job in jobs):
                raise _Abandoned

        self.last_step = monotonic()
        for job in jobs:
            if end := unread(self._pipe, job.request.prompt):
                job.result = f"the model does not read the end of the prompt: {end!r}; shorten it"
        with suppress(_Abandoned):
            for _, group in groupby(sorted((job for job in jobs if not job.result), key=_shape), _shape):
                batch = list(group)
                try:
                    pictures = draw_batch(self._pipe, [job.request for job in batch], go_on)
                except ValueError as error:  # such as a size that is too small for the method
                    for job in batch:
                        job.result = str(error)
                    continue
                for job, picture in zip(batch, pictures, strict=True):
                    job.result = png(picture, self._settings(job.request))

    def _settings(self, request: Request) -> dict[str, str]:
        height, width = request.size
        asked = {"prompt": request.prompt, "size": f"{width} x {height} px", "steps": str(request.steps)}
        return asked | {"seed": str(request.seed)} | self._about


class ImageReplica(ServedPipeline):
    """A `ServedPipeline` on Ray Serve.

    Args:
        *args: Arguments of `ServedPipeline`.
        batch: Largest number of images generated together.
        timeout: Seconds without a denoising step after which Ray replaces the replica.
        **options: Options of `ServedPipeline`.
    """

    def __init__(self, *args: Any, batch: int, timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeout = timeout
        together: Any = self._draw
        together.set_max_batch_size(batch)

    async def draw(self, *asked: Any) -> bytes | str:
        """PNG file for the arguments of `job`, or an error message."""
        job = self.job(*asked)
        try:
            return job.result or await self._draw(job)
        finally:
            job.abandoned = True

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica after an error."""
        if self.last_step and monotonic() - self.last_step > self._timeout:
            raise RuntimeError(f"no denoising step for {self._timeout:g} s")

    @serve.batch(batch_wait_timeout_s=0.01)
    async def _draw(self, jobs: list[Job]) -> list[bytes | str]:
        try:
            await asyncio.to_thread(self.draw_together, jobs)
        finally:
            self.last_step = None
        return [job.result for job in jobs]


def _shape(job: Job) -> Any:
    return job.request.size, job.request.steps
