# pyright: basic
"""A replica of the image service: a pipeline that draws in batches."""

import asyncio
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ray import serve

from foveate.diffusers.apply import apply
from foveate.diffusers.lora import Distilled, MethodLike, load_lora, using
from foveate.diffusers.pipelines import Request, check_request, draw_batch, load, own_size, quiet, unread
from foveate.diffusers.pixel_pipeline import PixelPipeline, as_method
from foveate.utils.files import png

__all__ = ["Painter"]


class _Abandoned(Exception):
    """Nobody waits for any picture of the batch."""


@dataclass
class _Job:
    request: Request
    over: bool = field(default=False)  # drawn, or nobody waits for it


class Painter:
    """One pipeline with one method set.

    Args:
        model: Folder or hub id of the pipeline.
        method: Method; None is dense.
        about: Settings that every picture carries.
        lora: File of a LoRA.
        size: Default (height, width) in pixels; None is the model's own.
        batch: Most pictures of one size and number of steps that are drawn together.
        device: See `foveate.utils.device.choose_device`.
        dtype: See `foveate.utils.device.choose_dtype`.
    """

    def __init__(
        self,
        model: str,
        method: MethodLike | None,
        about: dict[str, str],
        *,
        lora: Path | None = None,
        size: tuple[int, int] | None = None,
        batch: int = 4,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        quiet()
        self._pipe = load(model, device, dtype)
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
        self._draw.set_max_batch_size(batch)

    async def draw(self, prompt: str, size: tuple[int, int] | None, steps: int, seed: int) -> bytes | str:
        """The PNG file, or why it cannot be drawn."""
        request = Request(prompt, size or self._size, steps, None, seed)
        try:
            check_request(self._pipe, request)
        except ValueError as error:
            return str(error)
        job = _Job(request)
        try:
            return await self._draw(job)
        finally:
            job.over = True

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.01)
    async def _draw(self, jobs: list[_Job]) -> list[bytes | str]:
        return await asyncio.to_thread(self._draw_together, jobs)

    def _draw_together(self, jobs: list[_Job]) -> list[bytes | str]:
        """Results in the order of the jobs. What has the same size and number of steps is one batch."""
        results: dict[int, bytes | str] = {}

        def go_on() -> None:
            if all(job.over for job in jobs):
                raise _Abandoned

        for job in jobs:
            if end := unread(self._pipe, job.request.prompt):
                results[id(job)] = f"the model does not read the end of the prompt: {end!r}; shorten it"
        rest = sorted((job for job in jobs if id(job) not in results), key=_shape)
        for _, group in groupby(rest, _shape):
            batch = list(group)
            try:
                pictures = draw_batch(self._pipe, [job.request for job in batch], go_on)
            except _Abandoned:
                break
            for job, picture in zip(batch, pictures, strict=True):
                height, width = job.request.size
                about = {"prompt": job.request.prompt, "size": f"{width} x {height} px", "seed": str(job.request.seed)}
                results[id(job)] = png(picture, about | {"steps": str(job.request.steps)} | self._about)
        return [results.get(id(job), "") for job in jobs]


def _shape(job: _Job) -> Any:
    return job.request.size, job.request.steps
