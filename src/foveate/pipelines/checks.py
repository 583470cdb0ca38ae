# pyright: basic, reportPrivateImportUsage=false, reportCallIssue=false
"""Checks that refuse, with a remedy, requests that a pipeline cannot run or would silently change."""

from inspect import Parameter, signature
from math import isfinite

import diffusers
from diffusers import DiffusionPipeline

from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import (
    Request,
    arguments,
    config_file,
    makes_video,
    pixels_per_token,
    read_image,
    scale_argument,
)

__all__ = ["check_request", "check_size", "token_grid"]

MOST_TOKENS = 2**20
NEEDS_IMAGE = ("ImageToVideo", "Edit")
"""Parts of names of pipelines that need an image although the argument is optional."""
SEVERAL_IMAGES = ("Flux2", "QwenImageEditPlus")
"""Name prefixes of pipelines with several reference images."""


def check_request(pipeline: DiffusionPipeline, request: Request) -> None:
    """Refuse a request that the pipeline cannot run or would silently change, or that is too large.

    Raises:
        ValueError: If the pipeline has no such argument or would ignore it, if a side is not a multiple of the pixels
            of one token, if the number of frames does not fit, or if there are more than 2^20 tokens.
    """
    name, known = type(pipeline).__name__, arguments(pipeline)
    if missing := [need for need in ("prompt", "height", "width") if need not in known]:
        raise ValueError(f"{name} takes no {missing[0]}, which this command passes: generate with it from Python")
    _check_guidance(pipeline, request)
    _check_images(pipeline, request)
    token_grid(pipeline, request)


def token_grid(pipeline: DiffusionPipeline, request: Request) -> tuple[int, int, int]:
    """Frames, rows and columns of the tokens of a request; an image has one frame.

    Raises:
        ValueError: If the pipeline has no such size or number of frames, or there are more than 2^20 tokens.
    """
    multiple = _check_size(pipeline, request.size)
    frames, (rows, columns) = _check_frames(pipeline, request), (side // multiple for side in request.size)
    fewer = " or fewer frames" if makes_video(pipeline) else ""
    _check_tokens(frames * rows * columns, request.size, fewer)
    return frames, rows, columns


def _check_tokens(tokens: int, size: tuple[int, int], fewer: str = "") -> None:
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"{size[1]} x {size[0]} px are {tokens:,} tokens, more than {MOST_TOKENS:,}: use a smaller size{fewer}"
        )


def _check_guidance(pipeline: DiffusionPipeline, request: Request) -> None:
    known, scale = arguments(pipeline), scale_argument(pipeline, request)
    if request.negative is not None and "negative_prompt" not in known:
        raise ValueError(f"{type(pipeline).__name__} takes no negative prompt: leave the negative prompt out")
    if request.guidance is not None and not isfinite(request.guidance):
        raise ValueError(f"the guidance scale is {request.guidance}: give a number such as 4")
    if request.guidance is not None and scale is None:
        and_negative = ", or add a negative prompt" if "true_cfg_scale" in known else ""
        raise ValueError(
            f"this model takes no guidance scale ({request.guidance}): leave the guidance out{and_negative}"
        )
    if request.negative is not None and scale is not None:
        strength = known[scale] if request.guidance is None else request.guidance
        if strength is not None and strength <= 1:
            raise ValueError(
                f"a negative prompt has no effect with a guidance scale of {strength}: use one above 1, such as 4"
            )


def _check_images(pipeline: DiffusionPipeline, request: Request) -> None:
    name, known = type(pipeline).__name__, arguments(pipeline)
    if request.images and "image" not in known:
        raise ValueError(f"{name} takes no images: leave them out, or name a model for editing or image to video")
    if not request.images and (known.get("image") is Parameter.empty or any(word in name for word in NEEDS_IMAGE)):
        raise ValueError(f"{name} starts from an image: name its file")
    if len(request.images) > 1 and not name.startswith(SEVERAL_IMAGES):
        raise ValueError(f"{name} takes one image, not {len(request.images)}")
    for path in request.images:
        try:
            read_image(path)
        except OSError as error:
            raise ValueError(f"cannot read the image {path}: name a PNG or JPEG file") from error


def check_size(model: str, size: tuple[int, int]) -> None:
    """Refuse an invalid size by the model's configuration files, before its weights are loaded.

    Models whose files do not tell, such as video models, are checked later, by `check_request`.

    Raises:
        ValueError: If a side is not a multiple of the pixels of one token, or there are more than 2^20 tokens.
    """
    try:
        kind = config_file(model)["_class_name"]
        if kind == PixelPipeline.__name__:
            return _check_sides(config_file(model, "transformer/config.json")["patch_size"], size)
        if "num_frames" in signature(getattr(diffusers, kind).__call__).parameters:
            return None
        vae = config_file(model, "vae/config.json")
    except (OSError, ValueError, KeyError, AttributeError):  # loading reports the error
        return None
    halvings = (
        len(vae["block_out_channels"]) - 1 if "block_out_channels" in vae else len(vae.get("temperal_downsample", ()))
    )
    return _check_sides(2 ** (halvings + 1), size) if halvings else None


def _check_size(pipeline: DiffusionPipeline, size: tuple[int, int]) -> int:
    """Check width and height; returns the pixels of each side of a token."""
    multiple, buckets = pixels_per_token(pipeline), getattr(pipeline, "vae_image_processor", None)
    _check_sides(multiple, size)
    if buckets and (own := buckets.get_default_height_width(None, *size)) != size:  # JoyImage
        right, asked = (f"{width}x{height}" for height, width in (own, size))
        raise ValueError(f"{type(pipeline).__name__} generates {right} px, not {asked}: use {right}")
    return multiple


def _check_sides(multiple: int, size: tuple[int, int]) -> None:
    _check_tokens(size[0] * size[1] // multiple**2, size)  # a nearest size would be too large as well
    if any(side < multiple or side % multiple for side in size):
        nearest = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in size[::-1])
        raise ValueError(
            f"{size[1]} x {size[0]} px does not fit: this model packs {multiple} x {multiple} px into a token; "
            f"use multiples of {multiple}, for example {nearest}"
        )


def _check_frames(pipeline: DiffusionPipeline, request: Request) -> int:
    """Check the number of frames; returns the number of latent frames."""
    if not makes_video(pipeline):
        if request.frames is not None or request.fps is not None:
            raise ValueError(
                f"{type(pipeline).__name__} generates images: leave frames and fps out, or name a video model, "
                "such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
            )
        return 1
    known = arguments(pipeline)
    if "enable_temporal_reasoning" in known and request.frames not in (None, 5):  # ChronoEdit
        raise ValueError(f"{type(pipeline).__name__} always generates 5 frames: leave frames out")
    frames = request.frames or known["num_frames"] or 1
    names = "vae_scale_factor_temporal", "vae_temporal_compression_ratio"
    packed = next((scale for name in names if (scale := getattr(pipeline, name, None))), 1)
    if (frames - 1) % packed:
        raise ValueError(
            f"{frames} frames do not fit: after the first one this model packs {packed} frames into one; "
            f"use a multiple of {packed} plus 1, for example {round((frames - 1) / packed) * packed + 1}"
        )
    return (frames - 1) // packed + 1
