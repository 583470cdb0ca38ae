# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""What a distillation sees: latents of pictures with the embeddings of their captions, kept on disk.

Each pair is a file of its own, written whole: what is there is never made again.
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from accelerate import PartialState
from diffusers import FluxPipeline
from jaxtyping import Float
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import Dataset

from foveate.diffusers.pipelines import Request, fingerprint, text_tokens
from foveate.utils.files import claim, write_whole

__all__ = ["PICTURES", "Noisy", "NoisyPairs", "captioned", "chance", "make_pairs"]

PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def chance(kind: str, seed: int, number: int) -> torch.Generator:
    """Random numbers of a kind that follow from a seed and a number alone."""
    return torch.Generator().manual_seed(random.Random(f"{kind} {seed} {number}").getrandbits(63))


def captioned(folder: Path, prompts: Sequence[str] | None) -> dict[Path, str]:
    """The pictures of a folder by name, each with its caption: from the .txt beside it, or the prompts in order.

    Raises:
        ValueError: If there is no picture, a caption is missing, or there are fewer prompts than pictures.
    """
    pictures = sorted(path for path in folder.glob("*") if path.suffix.lower() in PICTURES)
    if not pictures:
        raise ValueError(f"{folder} holds no pictures: name a folder of {', '.join(PICTURES)} files")
    if prompts is None:
        without = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
        if without:
            raise ValueError(
                f"{without[0]} has no caption: put one into {Path(without[0]).stem}.txt, or use --prompts"
            )
        return {path: path.with_suffix(".txt").read_text().strip() for path in pictures}
    if len(prompts) < len(pictures):
        raise ValueError(f"{len(pictures)} pictures in {folder}, but {len(prompts)} prompts: give one for each")
    return dict(zip(pictures, prompts, strict=False))


def make_pairs(
    folder: Path,
    pipeline: FluxPipeline,
    prompts: Sequence[str],
    request: Request,
    *,
    pictures: Sequence[Path] = (),
    at_once: int = 1,
    until: float = math.inf,
    advance: Callable[[], None] = lambda: None,
) -> bool:
    """Make the pairs that are not there yet, each device its share; whether all are there now.

    But for rounding, a pair is the same whatever is made together with it.

    Args:
        folder: Gets one file for each prompt.
        pipeline: Draws the pictures, or encodes those that are there.
        prompts: The captions.
        request: Size, denoising steps, guidance and first seed; its prompt is not used.
        pictures: Of the prompts, in their order; without any, the pipeline draws them.
        at_once: Pictures that a device draws or encodes together.
        until: When to stop, by `time.monotonic`.
        advance: Called for every pair that is there.

    Raises:
        ValueError: If the folder holds pairs of other settings.
    """
    state = PartialState()
    with state.main_process_first():
        claim(folder, _settings(pipeline, request, bool(pictures)))
    names = [f"{picture.name}: " for picture in pictures] or len(prompts) * [""]
    sources = [name + prompt for name, prompt in zip(names, prompts, strict=True)]
    missing: list[int] = []
    for index, source in enumerate(sources):
        if (path := _path(folder, index)).exists():
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
        pairs = _encoded(pipeline, requests, given) if given else _drawn(pipeline, requests)
        for index, pair in zip(part, pairs, strict=True):
            write_whole(_path(folder, index), save(pair, {"source": sources[index]}))
            advance()
    state.wait_for_everyone()
    return all(_path(folder, index).exists() for index in range(len(prompts)))


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.safetensors"


def _settings(pipeline: FluxPipeline, request: Request, given: bool) -> dict[str, str]:
    settings = {
        "weights": fingerprint(pipeline.vae if given else pipeline.transformer),
        "size": request.size,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
    }
    if not given:
        settings |= {"steps": request.steps, "guidance": request.guidance, "seed": request.seed}
    return {name: str(value) for name, value in settings.items()}


def _check(path: Path, source: str) -> None:
    with safe_open(path, "pt") as pair:
        if (before := pair.metadata()["source"]) != source:
            raise ValueError(f"{path} was made of {before!r}, not of {source!r}: name another folder with --out")


@torch.no_grad()
def _text(pipeline: FluxPipeline, requests: Sequence[Request]) -> dict[str, Any]:
    prompts = [request.prompt for request in requests]
    text, pooled, _ = pipeline.encode_prompt(prompts, None, max_sequence_length=text_tokens(pipeline))
    return {"prompt_embeds": text, "pooled_prompt_embeds": pooled}


def _drawn(pipeline: FluxPipeline, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
    words, shared = _text(pipeline, requests), requests[0]
    guidance = {} if shared.guidance is None else {"guidance_scale": shared.guidance}
    latents = pipeline(
        **words,
        **guidance,
        height=shared.size[0],
        width=shared.size[1],
        num_inference_steps=shared.steps,
        generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
        output_type="latent",
    ).images
    return _pairs(latents, words)


@torch.no_grad()
def _encoded(pipeline: FluxPipeline, requests: Sequence[Request], pictures: Sequence[Path]) -> list[dict[str, Tensor]]:
    opened = [_opened(picture) for picture in pictures]
    pixels = pipeline.image_processor.preprocess(opened, *requests[0].size, resize_mode="crop")
    vae = pipeline.vae
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return _pairs(pipeline._pack_latents(latents, *latents.shape), _text(pipeline, requests))


def _opened(picture: Path) -> Image.Image:
    with Image.open(picture) as file:
        return file.convert("RGB")


def _pairs(latents: Tensor, words: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """One for each sample of the batch."""
    together = {"latents": latents, **words}
    each = zip(*(tensor.cpu().contiguous() for tensor in together.values()), strict=True)
    return [dict(zip(together, tensors, strict=True)) for tensors in each]


class Noisy(NamedTuple):
    """Noisy packed latents, their noise levels from 0 (clean) to 1, and the words; one, or a batch of them."""

    latents: Float[Tensor, "*batch tokens channels"]
    level: Float[Tensor, "*batch"]
    text: Float[Tensor, "*batch words text_dim"]
    pooled: Float[Tensor, "*batch pooled_dim"]


class NoisyPairs(Dataset[Noisy]):
    """Pairs under random noise, epoch after epoch: sample n follows from n and the seed alone.

    Args:
        folder: Of the pairs.
        prompts: Their captions.
        seed: Of order and noise.
        shift: By how much the logarithm of signal to noise is moved towards noise; at 0 the levels are uniform.
    """

    def __init__(self, folder: Path, prompts: Sequence[str], seed: int, shift: float = 0.0):
        self.folder, self.count, self.seed, self.shift = folder, len(prompts), seed, shift
        self.checksum = f"{crc32(json.dumps(list(prompts)).encode()):08x}"

    def __getitem__(self, number: int) -> Noisy:
        epoch, place = divmod(number, self.count)
        shuffled = torch.randperm(self.count, generator=chance("epoch", self.seed, epoch))
        pair = load_file(_path(self.folder, int(shuffled[place])))
        own = chance("sample", self.seed, number)
        level = torch.sigmoid(torch.logit(torch.rand((), generator=own)) + self.shift)
        clean = pair["latents"].float()
        latents = (1 - level) * clean + level * torch.randn(clean.shape, generator=own)
        return Noisy(latents, level, pair["prompt_embeds"], pair["pooled_prompt_embeds"])
