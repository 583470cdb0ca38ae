# pyright: basic, reportPrivateImportUsage=false, reportCallIssue=false
"""Load a pipeline, draw with it, and time its denoiser."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from safetensors import SafetensorError

from foveate.diffusers.apply import DENOISERS
from foveate.diffusers.hub import fetch
from foveate.diffusers.lora import MethodLike, throughout, using
from foveate.diffusers.pixel_pipeline import PixelPipeline
from foveate.utils.device import choose_device, choose_dtype, now

__all__ = [
    "Request",
    "check_request",
    "denoiser",
    "draw",
    "draw_batch",
    "fingerprint",
    "load",
    "noise_shift",
    "ready",
    "record_step",
    "text_tokens",
    "time_steps",
    "unread",
]

INDEX = DiffusionPipeline.config_name
MOST_TOKENS = 2**20


def load(model: str, device: str = "auto", dtype: str = "auto") -> DiffusionPipeline:
    """The pipeline of a hub id or folder, ready to draw.

    Args:
        model: A folder that holds a model_index.json, or a hub id.
        device: See `foveate.utils.device.choose_device`.
        dtype: See `foveate.utils.device.choose_dtype`.

    Raises:
        ValueError: If there is no such pipeline, it has no denoiser, or device or dtype are unknown.
    """
    precision = choose_dtype(dtype, choose_device(device))
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / INDEX).is_file():
        raise ValueError(f"{model} is no pipeline folder: name one that holds a {INDEX}")
    try:
        index = folder / INDEX if folder.is_dir() else fetch(model, INDEX)
        own = json.loads(index.read_text()).get("_class_name") == PixelPipeline.__name__
        kind = PixelPipeline if own else DiffusionPipeline
        pipeline = kind.from_pretrained(folder if folder.is_dir() else model, dtype=precision)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer = getattr(pipeline, name, None)
        if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers says nothing
            raise ValueError(f"cannot load {model}: its {name} has no words; its files are missing")
    return ready(pipeline, device, dtype)


def ready(pipeline: DiffusionPipeline, device: str = "auto", dtype: str = "auto") -> DiffusionPipeline:
    """The pipeline on its device and in its dtype, without progress bars of its own.

    Raises:
        ValueError: If the pipeline has no denoiser, or device or dtype are unknown.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    if not any(getattr(pipeline, name, None) is not None for name in DENOISERS):
        raise ValueError(f"{type(pipeline).__name__} has no {', '.join(DENOISERS)}: foveate works in a denoiser")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(where, precision)


def fingerprint(model: torch.nn.Module) -> str:
    """Checksum of the last weight without LoRAs, to tell two trainings of one model apart."""
    *_, last = (weight for name, weight in model.named_parameters() if "lora_" not in name)
    return f"{crc32(last.detach().float().cpu().numpy().tobytes()):08x}"


class Request(NamedTuple):
    """One picture to draw.

    Attributes:
        prompt: The text.
        size: (height, width) in pixels.
        steps: Number of denoising steps.
        guidance: Guidance scale; None is the pipeline's default.
        seed: Seed of the initial noise, which is drawn on the CPU so that all devices start from the same.
    """

    prompt: str
    size: tuple[int, int]
    steps: int
    guidance: float | None
    seed: int


def check_request(pipeline: DiffusionPipeline, request: Request) -> None:
    """Refuse a request that the pipeline would silently change, or that is too large.

    Raises:
        ValueError: If a side is not a multiple of the pixels of one token, there are more than 2^20 tokens, or
            the model takes no guidance scale.
    """
    config = getattr(getattr(pipeline, "transformer", None), "config", None)
    if request.guidance is not None and not getattr(config, "guidance_embeds", True):
        raise ValueError(f"this model takes no guidance scale ({request.guidance}): leave --guidance out")
    size = request.size
    if isinstance(pipeline, PixelPipeline):
        multiple = pipeline.transformer.config.patch_size
    else:
        multiple = 2 * getattr(pipeline, "vae_scale_factor", 8)
    if any(side < multiple or side % multiple for side in size):
        nearest = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in size[::-1])
        raise ValueError(
            f"{size[1]} x {size[0]} px does not fit: this model packs {multiple} x {multiple} px into a token; "
            f"use multiples of {multiple}, for example {nearest}"
        )
    if (tokens := size[0] * size[1] // multiple**2) > MOST_TOKENS:
        raise ValueError(
            f"{size[1]} x {size[0]} px are {tokens:,} tokens, more than {MOST_TOKENS:,}: use a smaller size"
        )


def draw(pipeline: DiffusionPipeline, request: Request, on_step: Callable[[], None] = lambda: None) -> Image.Image:
    """The picture. `on_step` is called after every denoising step."""
    return draw_batch(pipeline, [request], on_step)[0]


def draw_batch(
    pipeline: DiffusionPipeline, requests: Sequence[Request], on_step: Callable[[], None] = lambda: None
) -> list[Image.Image]:
    """The pictures of requests that differ in prompt and seed only, drawn together."""

    def after_step(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    shared = requests[0]
    optional = {"guidance_scale": shared.guidance, "max_sequence_length": text_tokens(pipeline)}
    return pipeline(
        prompt=[request.prompt for request in requests],
        generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
        height=shared.size[0],
        width=shared.size[1],
        num_inference_steps=shared.steps,
        callback_on_step_end=after_step,
        **{name: value for name, value in optional.items() if value is not None},
    ).images


def text_tokens(pipeline: DiffusionPipeline) -> int | None:
    """Number of text tokens to pad to: the pipeline's default, or its last tokenizer's limit if smaller."""
    asked = signature(pipeline.__call__).parameters.get("max_sequence_length")
    return None if asked is None else min(asked.default, _tokenizers(pipeline)[-1].model_max_length)


def unread(pipeline: DiffusionPipeline, prompt: str) -> str:
    """The end of a prompt that is cut off because it is too long for all text encoders."""
    if not (tokenizers := _tokenizers(pipeline)):
        return ""
    most = text_tokens(pipeline) or tokenizers[-1].model_max_length
    return tokenizers[-1].decode(tokenizers[-1](prompt).input_ids[most - 1 :], skip_special_tokens=True)


def _tokenizers(pipeline: DiffusionPipeline) -> list[Any]:
    """The tokenizers of a pipeline; the last one takes the longest text."""
    names = "tokenizer", "tokenizer_2", "tokenizer_3"
    return [tokenizer for name in names if (tokenizer := getattr(pipeline, name, None)) is not None]


def noise_shift(scheduler: Any, tokens: int) -> float:
    """Shift of the logit of a flow-matching scheduler's noise levels for this number of image tokens."""
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return math.log(config.shift)
    names = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
    return calculate_shift(tokens, *(config[name] for name in names))


class Call(NamedTuple):
    """Arguments of one forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def denoiser(pipeline: DiffusionPipeline) -> torch.nn.Module:
    """The transformer or UNet that a pipeline calls in every step."""
    return next(model for name in DENOISERS if (model := getattr(pipeline, name, None)) is not None)


def record_step(pipeline: DiffusionPipeline, request: Request) -> Call:
    """Arguments of the first call of the denoiser for a request; the run stops there."""

    class Recorded(Exception):
        pass

    def stop(_model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Recorded(args, kwargs)

    hook = denoiser(pipeline).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        draw(pipeline, request)
    except Recorded as recorded:
        return Call(*recorded.args)
    finally:
        hook.remove()
    raise ValueError(f"{type(pipeline).__name__} never called its denoiser")


@torch.no_grad()
def time_steps(
    pipeline: DiffusionPipeline,
    step: Call,
    variants: Sequence[MethodLike | None],
    rounds: int,
    on_forward: Callable[[], None] = lambda: None,
) -> Iterator[list[float]]:
    """Seconds of one forward pass of the denoiser with each variant, round by round, after a round to warm up.

    Methods with start_percent or end_percent are timed at work.

    Args:
        pipeline: The pipeline.
        step: Arguments of the forward pass, from `record_step`.
        variants: Methods to compare; None is dense.
        rounds: Number of measurements of each.
        on_forward: Called after every forward pass.
    """
    for round_ in range(rounds + 1):
        seconds: list[float] = []
        for way in variants:
            with using(pipeline, way and throughout(way)):
                start = now(pipeline.device)
                denoiser(pipeline)(
                    *step.args, **{k: copy(v) if isinstance(v, dict) else v for k, v in step.kwargs.items()}
                )
                seconds.append(now(pipeline.device) - start)
            on_forward()
        if round_:
            yield seconds
