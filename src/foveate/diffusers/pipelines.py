# pyright: basic, reportPrivateImportUsage=false, reportCallIssue=false
"""Load a pipeline, draw with it, and time its denoiser."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.utils import export_to_video
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from foveate.diffusers.apply import DENOISERS
from foveate.diffusers.hub import fetch
from foveate.diffusers.lora import MethodLike, throughout, using
from foveate.diffusers.pixel_pipeline import PixelPipeline
from foveate.utils.device import choose_device, choose_dtype, now
from foveate.utils.files import write_whole

__all__ = [
    "Call",
    "Request",
    "arguments",
    "check_request",
    "check_size",
    "denoiser",
    "draw",
    "draw_batch",
    "fingerprint",
    "frame_rate",
    "load",
    "makes_video",
    "noise_shift",
    "own_size",
    "pixels_per_token",
    "quiet",
    "ready",
    "record_step",
    "run_step",
    "text_tokens",
    "time_steps",
    "unread",
    "write_video",
]

INDEX = DiffusionPipeline.config_name
MOST_TOKENS = 2**20
NEEDS_IMAGE = ("ImageToVideo", "Edit")
"""Parts of the names of pipelines that cannot run without an image, although it is an optional argument."""
SEVERAL_IMAGES = ("Flux2", "QwenImageEditPlus")
"""How the names of pipelines begin that take several reference images."""


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
        own = _config(model, INDEX).get("_class_name") == PixelPipeline.__name__
        kind = PixelPipeline if own else DiffusionPipeline
        pipeline = kind.from_pretrained(folder if folder.is_dir() else model, dtype=precision)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error
    for name, tokenizer in _tokenizers(pipeline).items():
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers says nothing
            raise ValueError(f"cannot load {model}: its {name} has no words; its files are missing")
    return ready(pipeline, device, dtype)


def quiet() -> None:
    """Turn off the warnings and progress bars with which the libraries load models."""
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


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
    """One picture or video to draw.

    Attributes:
        prompt: The text.
        size: (height, width) in pixels.
        steps: Number of denoising steps.
        guidance: Guidance scale; None is the pipeline's default.
        seed: Seed of the initial noise, which is drawn on the CPU so that all devices start from the same.
        negative: Negative prompt; None is the pipeline's default.
        frames: Number of frames of a video; None is the pipeline's default.
        fps: Frames per second of a video; None is the pipeline's default.
        images: Files with the first frame of a video, or with reference images.
    """

    prompt: str
    size: tuple[int, int]
    steps: int
    guidance: float | None
    seed: int
    negative: str | None = None
    frames: int | None = None
    fps: int | None = None
    images: tuple[Path, ...] = ()


def makes_video(pipeline: DiffusionPipeline) -> bool:
    """Whether the pipeline makes videos."""
    return "num_frames" in arguments(pipeline)


def arguments(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """Default of each argument of a pipeline's call, by name; `Parameter.empty` for arguments without one."""
    return {name: parameter.default for name, parameter in signature(pipeline.__call__).parameters.items()}


def frame_rate(pipeline: DiffusionPipeline, request: Request) -> int:
    """Frames per second of the video: as requested, else the pipeline's default, else 16."""
    return request.fps or int(arguments(pipeline).get("frame_rate", 16))


def check_request(pipeline: DiffusionPipeline, request: Request) -> None:
    """Refuse a request that the pipeline cannot run or would silently change, or that is too large.

    Raises:
        ValueError: If the pipeline has no such argument or would ignore it, if a side is not a multiple of the pixels
            of one token, if the number of frames does not fit, or if there are more than 2^20 tokens.
    """
    name, known = type(pipeline).__name__, arguments(pipeline)
    if missing := [need for need in ("prompt", "height", "width") if need not in known]:
        raise ValueError(f"{name} takes no {missing[0]}, which this command passes: draw with it from Python")
    _check_guidance(pipeline, request)
    _check_images(pipeline, request)
    tokens = _check_size(pipeline, request.size) * _check_frames(pipeline, request)
    if tokens > MOST_TOKENS:
        fewer = " or fewer frames" if makes_video(pipeline) else ""
        raise ValueError(
            f"{request.size[1]} x {request.size[0]} px are {tokens:,} tokens, more than {MOST_TOKENS:,}: "
            f"use a smaller size{fewer}"
        )


def _check_guidance(pipeline: DiffusionPipeline, request: Request) -> None:
    known, scale = arguments(pipeline), _scale_argument(pipeline, request)
    if request.negative is not None and "negative_prompt" not in known:
        raise ValueError(f"{type(pipeline).__name__} takes no negative prompt: leave --negative out")
    if request.guidance is not None and scale is None:
        and_negative = ", or add --negative" if "true_cfg_scale" in known else ""
        raise ValueError(
            f"this model takes no guidance scale ({request.guidance}): leave --guidance out{and_negative}"
        )
    if request.negative is not None and scale is not None:
        strength = known[scale] if request.guidance is None else request.guidance
        if strength is not None and strength <= 1:
            raise ValueError(
                f"a negative prompt has no effect with a guidance scale of {strength}: use one above 1, "
                "such as --guidance 4"
            )


def _scale_argument(pipeline: DiffusionPipeline, request: Request) -> str | None:
    """The argument that takes the guidance scale; None if the pipeline would ignore it.

    Models that were distilled with guidance take it as an input. The others, and all with a negative prompt, run twice
    a step, which some pipelines call true classifier-free guidance.
    """
    known = arguments(pipeline)
    embedded = getattr(denoiser(pipeline).config, "guidance_embeds", None)
    true_scale = known.get("true_cfg_scale")
    if true_scale is not None and (request.negative is not None or (true_scale > 1 and not embedded)):
        return "true_cfg_scale"
    ignored = embedded is False and not hasattr(type(pipeline), "do_classifier_free_guidance")
    if "guidance_scale" not in known or ignored or pipeline.config.get("is_distilled"):
        return None
    return "guidance_scale"


def _check_images(pipeline: DiffusionPipeline, request: Request) -> None:
    name, known = type(pipeline).__name__, arguments(pipeline)
    if request.images and "image" not in known:
        raise ValueError(f"{name} takes no images: leave --image out, or name a model for editing or image to video")
    if not request.images and (known.get("image") is Parameter.empty or any(word in name for word in NEEDS_IMAGE)):
        raise ValueError(f"{name} starts from a picture: name its file with --image")
    if len(request.images) > 1 and not name.startswith(SEVERAL_IMAGES):
        raise ValueError(f"{name} takes one image, not {len(request.images)}: name one --image")
    for path in request.images:
        try:
            _read_image(path)
        except OSError as error:
            raise ValueError(f"cannot read the picture {path}: name a PNG or JPEG file with --image") from error


def _read_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def pixels_per_token(pipeline: DiffusionPipeline) -> int:
    """Side in pixels of the square that becomes one token."""
    config: Any = denoiser(pipeline).config
    if isinstance(pipeline, PixelPipeline):
        return config.patch_size
    for name in ("vae_scale_factor_spatial", "vae_spatial_compression_ratio"):  # of videos
        if scale := getattr(pipeline, name, None):
            patch = config.patch_size
            return scale * (patch if isinstance(patch, int) else patch[-1])
    return 2 * getattr(pipeline, "vae_scale_factor", 8)


def own_size(pipeline: DiffusionPipeline) -> tuple[int, int]:
    """(height, width) in pixels that a pipeline draws unless told otherwise; 1024 if it does not say."""
    known, own = arguments(pipeline), pipeline.config
    config: Any = denoiser(pipeline).config
    if "width" in own:  # a pixel model
        return own["height"], own["width"]
    if makes_video(pipeline):
        return known.get("height") or 480, known.get("width") or 832
    latent = getattr(pipeline, "default_sample_size", None) or config.get("sample_size")
    if not latent or not hasattr(pipeline, "vae_scale_factor"):
        return 1024, 1024
    height, width = (latent, latent) if isinstance(latent, int) else latent
    return height * pipeline.vae_scale_factor, width * pipeline.vae_scale_factor


def check_size(model: str, size: tuple[int, int]) -> None:
    """Refuse a size that a model cannot draw, by its configuration files, before its weights are loaded.

    Nothing is said about models whose files do not tell, such as video models: `check_request` refuses it later.

    Raises:
        ValueError: If a side is not a multiple of the pixels of one token.
    """
    try:
        kind = _config(model, INDEX)["_class_name"]
        if kind == PixelPipeline.__name__:
            return _check_sides(_config(model, "transformer/config.json")["patch_size"], size)
        if "num_frames" in signature(getattr(diffusers, kind).__call__).parameters:
            return None
        vae = _config(model, "vae/config.json")
    except (OSError, ValueError, KeyError, AttributeError):  # loading will say what is wrong
        return None
    halvings = (
        len(vae["block_out_channels"]) - 1 if "block_out_channels" in vae else len(vae.get("temperal_downsample", ()))
    )
    return _check_sides(2 ** (halvings + 1), size) if halvings else None


def _config(model: str, file: str) -> dict[str, Any]:
    """A configuration file of a folder or hub id."""
    folder = Path(model).expanduser()
    return json.loads((folder / file if folder.is_dir() else fetch(model, file)).read_text())


def _check_size(pipeline: DiffusionPipeline, size: tuple[int, int]) -> int:
    """Number of tokens of a frame."""
    multiple, buckets = pixels_per_token(pipeline), getattr(pipeline, "vae_image_processor", None)
    _check_sides(multiple, size)
    if buckets and (own := buckets.get_default_height_width(None, *size)) != size:  # JoyImage
        right, asked = (f"{width}x{height}" for height, width in (own, size))
        raise ValueError(f"{type(pipeline).__name__} would draw {right} px, not {asked}: use --size {right}")
    return size[0] * size[1] // multiple**2


def _check_sides(multiple: int, size: tuple[int, int]) -> None:
    if any(side < multiple or side % multiple for side in size):
        nearest = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in size[::-1])
        raise ValueError(
            f"{size[1]} x {size[0]} px does not fit: this model packs {multiple} x {multiple} px into a token; "
            f"use multiples of {multiple}, for example {nearest}"
        )


def _check_frames(pipeline: DiffusionPipeline, request: Request) -> int:
    """Number of frames of the latents."""
    if not makes_video(pipeline):
        if request.frames is not None or request.fps is not None:
            raise ValueError(
                f"{type(pipeline).__name__} draws pictures: leave --frames and --fps out, or name a video model, "
                "such as --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
            )
        return 1
    known = arguments(pipeline)
    if "enable_temporal_reasoning" in known and request.frames not in (None, 5):  # ChronoEdit
        raise ValueError(f"{type(pipeline).__name__} always makes 5 frames: leave --frames out")
    frames = request.frames or known["num_frames"] or 1
    names = "vae_scale_factor_temporal", "vae_temporal_compression_ratio"
    packed = next((scale for name in names if (scale := getattr(pipeline, name, None))), 1)
    if (frames - 1) % packed:
        raise ValueError(
            f"{frames} frames do not fit: after the first one this model packs {packed} frames into one; "
            f"use a multiple of {packed} plus 1, for example {round((frames - 1) / packed) * packed + 1}"
        )
    return (frames - 1) // packed + 1


def draw(
    pipeline: DiffusionPipeline, request: Request, on_step: Callable[[], None] = lambda: None
) -> list[Image.Image]:
    """The frames of a video; a picture is one frame. `on_step` is called after every denoising step."""
    output = _call(pipeline, [request], on_step)
    return output.frames[0] if makes_video(pipeline) else output.images


def draw_batch(
    pipeline: DiffusionPipeline, requests: Sequence[Request], on_step: Callable[[], None] = lambda: None
) -> list[Image.Image]:
    """The pictures of requests that differ in prompt and seed only, drawn together."""
    return _call(pipeline, requests, on_step).images


def _call(pipeline: DiffusionPipeline, requests: Sequence[Request], on_step: Callable[[], None]) -> Any:
    """What the pipeline returns."""

    def after_step(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    shared, known = requests[0], arguments(pipeline)
    scale, negative = _scale_argument(pipeline, shared), shared.negative
    if scale == "true_cfg_scale" and (shared.guidance or 0) > 1 and negative is None:
        negative = " "  # without a negative prompt there would be no guidance
    images = [_read_image(path) for path in shared.images]
    asked = {
        scale or "guidance_scale": shared.guidance,
        "negative_prompt": None if negative is None else [negative] * len(requests),
        "num_frames": shared.frames,
        "image": images[0] if len(images) == 1 else images or None,
        "max_sequence_length": text_tokens(pipeline),
    }
    where_known = {"frame_rate": shared.fps, "output_type": "pil", "callback_on_step_end": after_step}
    asked |= {name: value for name, value in where_known.items() if name in known}
    with torch.random.fork_rng([pipeline.device] if pipeline.device.type == "cuda" else []):
        torch.manual_seed(shared.seed)  # JoyImage encodes its reference with random numbers outside of the generators
        return pipeline(
            prompt=[request.prompt for request in requests],
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
            height=shared.size[0],
            width=shared.size[1],
            num_inference_steps=shared.steps,
            **{name: value for name, value in asked.items() if value is not None},
        )


def write_video(path: Path, frames: Sequence[Image.Image], fps: int) -> None:
    """Write an MP4 file; needs imageio-ffmpeg."""
    with TemporaryDirectory() as folder:
        video = Path(folder, "video.mp4")
        export_to_video([*frames], str(video), fps=fps)
        write_whole(path, video.read_bytes())


def text_tokens(pipeline: DiffusionPipeline) -> int | None:
    """Number of text tokens to pad to: the pipeline's default, or its tokenizers' limit if smaller."""
    usual = arguments(pipeline).get("max_sequence_length")
    return None if usual is None else min(usual, _longest(pipeline).model_max_length)


def unread(pipeline: DiffusionPipeline, prompt: str) -> str:
    """The end of a prompt that is cut off because it is too long for all text encoders."""
    if not _tokenizers(pipeline):
        return ""
    tokenizer = _longest(pipeline)
    most = text_tokens(pipeline) or tokenizer.model_max_length
    return tokenizer.decode(tokenizer(prompt).input_ids[most - 1 :], skip_special_tokens=True)


def _longest(pipeline: DiffusionPipeline) -> Any:
    """The tokenizer that takes the longest text; the last one of several."""
    return max(reversed(_tokenizers(pipeline).values()), key=lambda tokenizer: tokenizer.model_max_length)


def _tokenizers(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """The tokenizers of a pipeline by name; that of a processor is in it."""
    names = "tokenizer", "tokenizer_2", "tokenizer_3"
    found = {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}
    return {name: getattr(part, "tokenizer", part) for name, part in found.items()}


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
def run_step(pipeline: DiffusionPipeline, step: Call) -> Any:
    """The output of one forward pass of the denoiser; some models remove entries from dictionaries they get."""
    arguments = {name: copy(value) if isinstance(value, dict) else value for name, value in step.kwargs.items()}
    return denoiser(pipeline)(*step.args, **arguments)


@torch.no_grad()
def time_steps(
    pipeline: DiffusionPipeline,
    step: Call,
    variants: Sequence[MethodLike | None],
    rounds: int,
    on_forward: Callable[[], None] = lambda: None,
    *,
    warm_up: bool = True,
) -> Iterator[list[float]]:
    """Seconds of one forward pass of the denoiser with each variant, round by round.

    Methods with start_percent or end_percent are timed at work.

    Args:
        pipeline: The pipeline.
        step: Arguments of the forward pass, from `record_step`.
        variants: Methods to compare; None is dense.
        rounds: Number of measurements of each.
        on_forward: Called after every forward pass.
        warm_up: Run a round first that is not timed.
    """
    for round_ in range(not warm_up, rounds + 1):
        seconds: list[float] = []
        for method in variants:
            with using(pipeline, method and throughout(method)):
                start = now(pipeline.device)
                run_step(pipeline, step)
                seconds.append(now(pipeline.device) - start)
            on_forward()
        if round_:
            yield seconds
