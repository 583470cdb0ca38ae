# pyright: basic, reportPrivateImportUsage=false, reportCallIssue=false
"""Load a pipeline and generate with it."""

import json
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.utils import export_to_video
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from foveate.diffusers.apply import denoisers
from foveate.pipelines.hub import fetch
from foveate.pipelines.pixel import PixelPipeline
from foveate.utils.device import choose_device, choose_dtype
from foveate.utils.files import write_whole

__all__ = [
    "Request",
    "arguments",
    "config_file",
    "denoiser",
    "draw",
    "draw_batch",
    "fingerprint",
    "frame_rate",
    "load_pipeline",
    "makes_video",
    "own_size",
    "pixels_per_token",
    "quiet",
    "read_image",
    "ready",
    "scale_argument",
    "text_tokens",
    "unread",
    "write_video",
]


def load_pipeline(model: str, device: str = "auto", dtype: str = "auto") -> DiffusionPipeline:
    """Load the pipeline of a hub id or folder, ready to generate.

    Args:
        model: A folder that holds a model_index.json, or a hub id.
        device: See `foveate.utils.device.choose_device`.
        dtype: See `foveate.utils.device.choose_dtype`.

    Raises:
        ValueError: If there is no such pipeline, it has no denoiser, or device or dtype are unknown.
    """
    precision = choose_dtype(dtype, choose_device(device))
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / DiffusionPipeline.config_name).is_file():
        raise ValueError(f"{model} is no pipeline folder: name one that holds a {DiffusionPipeline.config_name}")
    try:
        own = config_file(model).get("_class_name") == PixelPipeline.__name__
        kind = PixelPipeline if own else DiffusionPipeline
        pipeline = kind.from_pretrained(folder if folder.is_dir() else model, dtype=precision)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error
    for name, tokenizer in _tokenizers(pipeline).items():
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers raises no error
            raise ValueError(f"cannot load {model}: its {name} has no words; its files are missing")
    return ready(pipeline, device, dtype)


def config_file(model: str, file: str = DiffusionPipeline.config_name) -> dict[str, Any]:
    """A configuration file of a folder or hub id."""
    folder = Path(model).expanduser()
    return json.loads((folder / file if folder.is_dir() else fetch(model, file)).read_text())


def quiet() -> None:
    """Turn off the libraries' warnings and progress bars."""
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def ready(pipeline: DiffusionPipeline, device: str = "auto", dtype: str = "auto") -> DiffusionPipeline:
    """Move the pipeline to its device and dtype, without progress bars.

    Raises:
        ValueError: If the pipeline has no denoiser, or device or dtype are unknown.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    denoisers(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(where, precision)


def fingerprint(model: torch.nn.Module) -> str:
    """Checksum of the last weight without LoRAs, to tell two trainings of one model apart."""
    *_, last = (weight for name, weight in model.named_parameters() if "lora_" not in name)
    return f"{crc32(last.detach().float().cpu().numpy().tobytes()):08x}"


def denoiser(pipeline: DiffusionPipeline | ModularPipeline) -> torch.nn.Module:
    """The transformer or UNet that a pipeline calls in every step."""
    return next(iter(denoisers(pipeline).values()))


class Request(NamedTuple):
    """One image or video to generate.

    Attributes:
        prompt: Prompt.
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
    """Default (height, width) of a pipeline in pixels; 1024 if it has none."""
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


def draw(
    pipeline: DiffusionPipeline, request: Request, on_step: Callable[[], None] = lambda: None
) -> list[Image.Image]:
    """Generate the frames of a video, or one image. `on_step` is called after every denoising step."""
    drawn = draw_batch(pipeline, [request], on_step)
    return drawn[0] if makes_video(pipeline) else drawn


def draw_batch(
    pipeline: DiffusionPipeline,
    requests: Sequence[Request],
    on_step: Callable[[], None] = lambda: None,
    *,
    call: Callable[..., Any] | None = None,
) -> list[Any]:
    """Generate the images or videos of requests that differ in prompt and seed only, in one batch.

    Args:
        pipeline: The pipeline.
        requests: The requests.
        on_step: Called after every denoising step.
        call: Called with the arguments of the pipeline in its place; None calls the pipeline.
    """
    output = _call(pipeline, requests, on_step, call)
    return output.frames if makes_video(pipeline) else output.images


def _call(
    pipeline: DiffusionPipeline,
    requests: Sequence[Request],
    on_step: Callable[[], None],
    call: Callable[..., Any] | None,
) -> Any:
    """Output of the pipeline."""

    def after_step(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    shared, known = requests[0], arguments(pipeline)
    scale, negative = scale_argument(pipeline, shared), shared.negative
    if scale == "true_cfg_scale" and (shared.guidance or 0) > 1 and negative is None:
        negative = " "  # without a negative prompt there would be no guidance
    images = [read_image(path) for path in shared.images]
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
        return (call or pipeline)(
            prompt=[request.prompt for request in requests],
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
            height=shared.size[0],
            width=shared.size[1],
            num_inference_steps=shared.steps,
            **{name: value for name, value in asked.items() if value is not None},
        )


def scale_argument(pipeline: DiffusionPipeline, request: Request) -> str | None:
    """Name of the argument for the guidance scale; None if the pipeline would ignore it.

    Guidance-distilled models take it as an input. Other models, and all models with a negative prompt, run twice a
    step, called true classifier-free guidance in some pipelines.
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


def read_image(path: Path) -> Image.Image:
    """The image in a file."""
    with Image.open(path) as image:
        return image.convert("RGB")


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
    """End of a prompt that is beyond the limits of all text encoders."""
    if not _tokenizers(pipeline):
        return ""
    tokenizer = _longest(pipeline)
    most = text_tokens(pipeline) or tokenizer.model_max_length
    return tokenizer.decode(tokenizer(prompt).input_ids[most - 1 :], skip_special_tokens=True)


def _longest(pipeline: DiffusionPipeline) -> Any:
    """Tokenizer with the largest limit; the last one of several."""
    return max(reversed(_tokenizers(pipeline).values()), key=lambda tokenizer: tokenizer.model_max_length)


def _tokenizers(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """Tokenizers of a pipeline by name, including the tokenizers of processors."""
    names = "tokenizer", "tokenizer_2", "tokenizer_3"
    found = {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}
    return {name: getattr(part, "tokenizer", part) for name, part in found.items()}
