# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false
"""The training data of a distillation: latents of images with the text embeddings of their captions, on disk."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from diffusers import FluxPipeline, WanPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.pipelines.request import Request, fingerprint
from foveate.training.families import Family, family_of
from foveate.training.pictures import fitted, pair_path
from foveate.utils.device import dtype_name
from foveate.utils.files import claim, write_whole

__all__ = ["make_pairs"]


def make_pairs(
    folder: Path,
    pipeline: FluxPipeline | WanPipeline,
    prompts: Sequence[str],
    request: Request,
    *,
    pictures: Sequence[Path] = (),
    at_once: int = 1,
    until: float = math.inf,
    advance: Callable[[], None] = lambda: None,
) -> bool:
    """Write the missing pairs of a folder, divided among the devices; returns whether all pairs exist.

    Every pair is written atomically to one file, and does not depend on the rest of its batch, up to rounding.

    Args:
        folder: Folder of the pairs, one file for each prompt.
        pipeline: Generates the images or videos, or encodes the given images.
        prompts: The captions.
        request: Size, frames, denoising steps, guidance scale and first seed; its prompt is not used.
        pictures: Files of the images in the order of the prompts; if empty, the pipeline generates them.
        at_once: Batch size on a device.
        until: Time at which to stop, as given by `time.monotonic`.
        advance: Called for every existing pair.

    Raises:
        ValueError: If the folder holds pairs of other settings or other prompts.
    """
    state, family = PartialState(), family_of(pipeline, request)
    with state.main_process_first():
        claim(folder, _settings(pipeline, request, bool(pictures)))
    names = [f"{picture.name}: " for picture in pictures] or len(prompts) * [""]
    sources = [name + prompt for name, prompt in zip(names, prompts, strict=True)]
    missing: list[int] = []
    for index, source in enumerate(sources):
        if (path := pair_path(folder, index)).exists():
            _check(path, source)
            advance()
        elif index % state.num_processes == state.process_index:
            missing.append(index)
    for start in range(0, len(missing), at_once):
        if time.monotonic() > until:
            break
        part = missing[start : start + at_once]
        requests = [request._replace(prompt=prompts[index], seed=request.seed + index) for index in part]
        given = [pictures[index] for index in part] if pictures else []
        pairs = _encoded(family, requests, given) if given else _drawn(family, requests)
        for index, pair in zip(part, pairs, strict=True):
            write_whole(pair_path(folder, index), save(pair, {"source": sources[index]}))
            advance()
    state.wait_for_everyone()
    return all(pair_path(folder, index).exists() for index in range(len(prompts)))


def _settings(pipeline: FluxPipeline | WanPipeline, request: Request, given: bool) -> dict[str, str]:
    settings = {
        "weights": fingerprint(pipeline.vae if given else pipeline.transformer),
        "size": request.size,
        "dtype": dtype_name(pipeline.dtype),
    }
    if not given:
        settings |= {"steps": request.steps, "guidance": request.guidance, "seed": request.seed}
    if request.frames:
        settings["frames"] = request.frames
    return {name: str(value) for name, value in settings.items()}


def _check(path: Path, source: str) -> None:
    with safe_open(path, "pt") as pair:
        if (before := pair.metadata()["source"]) != source:
            raise ValueError(f"{path} was made from {before!r}, not from {source!r}: name another folder")


def _drawn(family: Family, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        embeddings = family.embeddings([request.prompt for request in requests])
    return _unbatched({"latents": family.latents(requests, embeddings), **embeddings})


@torch.no_grad()
def _encoded(family: Family, requests: Sequence[Request], pictures: Sequence[Path]) -> list[dict[str, Tensor]]:
    pixels: list[Tensor] = []
    for picture in pictures:
        with Image.open(picture) as file:
            pixels.append(fitted(file, requests[0].size))
    embeddings = family.embeddings([request.prompt for request in requests])
    return _unbatched({"latents": family.encoded(torch.stack(pixels)), **embeddings})


def _unbatched(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    samples = zip(*(tensor.cpu().contiguous() for tensor in batch.values()), strict=True)
    return [dict(zip(batch, tensors, strict=True)) for tensors in samples]
