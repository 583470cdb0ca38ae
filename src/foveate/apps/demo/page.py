"""The pages of `make demo`: what Foveate is, images and a video of the built-in models, and speeds of GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from foveate.apps.demo import LORAS, MODELS, find
from foveate.apps.demo.recogniser import judge_prompt
from foveate.apps.web.compare import PAGE, comparison, recommended
from foveate.apps.web.report import Intro, Measured
from foveate.methods import LLSA
from foveate.pipelines.lora import load_lora
from foveate.pipelines.request import Request, load_pipeline
from foveate.utils.progress import Track, silent

__all__ = ["IMAGE_SPEEDS", "VIDEO_SPEEDS", "write_pages"]

IMAGE_PROMPT, VIDEO_PROMPT = "a red apple above a blue car on a green background", "an owl moves up"
STEPS = 8
MERGES = "similar tokens are merged, so that layers run on fewer"
SELECTS = "blocks of tokens select the blocks that they read; the others are read as averages"
TILES = "tokens attend within tiles that slide from layer to layer, and to the centre"
H200, H100 = "NVIDIA H200", "NVIDIA H100"
IMAGE_SPEEDS = (
    Measured("dense", "dense", "95.7 %", "1.00x", "1.00x", H200, "0d41e4b"),
    Measured("ToMA, three quarters of the tokens", "ToMA", "95.7 %", "1.16x", "1.34x", H200, "0d41e4b", MERGES),
    Measured(
        "LLSA, top_k=16, no LoRA, first two fifths of the steps dense", "LLSA", "95.6 %", "1.02x",
        "1.27x", H200, "0d41e4b", SELECTS,
    ),
    Measured(
        "HilbertA, 4 tiles along the curve, as in the paper, with its LoRA", "HilbertA", "94.0 %", "1.07x",
        "1.37x", H200, "0d41e4b", TILES,
    ),
)  # fmt: skip
"""Rows of the README's table: objects in images of the built-in model, and speed-up of a run of FLUX.1-dev's size."""
VIDEO_SPEEDS = (
    Measured("dense", "dense", "100.0 %", "89 ms", "", H100, "4c2f45b"),
    Measured("LLSA, top_k=16, first two fifths dense", "LLSA", "99.7 %", "79 ms", "", H100, "4c2f45b", SELECTS),
)
"""Rows of the table of docs/quality-videos.md: the built-in video model, and the time of a video."""
HEADLINE = "Foveate makes transformers cheaper: they attend only where it matters"
ABOUT = (
    "Image and video models spend much of their time on attention between all pairs of tokens: the larger the image, "
    "the larger the part. One line adds a published method that skips most of these pairs or merges similar tokens. "
    "Another line removes it and restores the model bit for bit. It works with the models of diffusers, such as FLUX, "
    "Qwen-Image, Wan and SDXL; ToMA and LLSA need no training."
)
CODE = """pip install -e ".[diffusers]"            # in a clone

from foveate import ToMA, apply
with apply(pipe, ToMA(keep=0.75)):       # pipe: a pipeline of diffusers
    image = pipe("a lighthouse at dusk").images[0]
"""
IMAGES = (
    "FLUX.1-dev's size (12 B parameters, random weights), compiled: gain of a whole run over dense on the "
    "same GPU; objects found in images of the built-in model, 256 px"
)
VIDEOS = "the built-in video model, 96 px and 17 frames: time of a video in a batch, objects found"


def write_pages(out: Path, device: str = "auto", track: Track = silent) -> Path:
    """Write the page of images and, in the folder `video`, that of a video; returns the first page.

    Only recommended settings are shown. An interrupted call resumes.

    Args:
        out: Folder for the pages and their images.
        device: See `foveate.utils.device.choose_device`.
        track: Shows progress.

    Raises:
        ValueError: If the built-in models are missing, or the folder holds other files.
    """
    pipe = load_pipeline(str(MODELS[""].folder), device)
    distilled = load_lora(pipe, find(LORAS["built-in"]) / "pytorch_lora_weights.safetensors")
    if distilled is None:
        raise ValueError("the built-in LoRA is damaged: install foveate-models again")
    intro = _intro(IMAGE_SPEEDS, IMAGES, f"video/{PAGE}", "The same for a video", ("run at 1024 px", "run at 2048 px"))
    _page(pipe, "", IMAGE_PROMPT, recommended(distilled), out, intro, track, judge_prompt(IMAGE_PROMPT))
    name = "built-in-video"
    intro = _intro(VIDEO_SPEEDS, VIDEOS, f"../{PAGE}", "The same for images", ("a video", ""))
    video = load_pipeline(str(MODELS[name].folder), device)
    _page(video, name, VIDEO_PROMPT, [LLSA(top_k=16, start_percent=0.4)], out / "video", intro, track, None)
    return out / PAGE


def _intro(rows: tuple[Measured, ...], setting: str, link: str, other: str, columns: tuple[str, str]) -> Intro:
    return Intro(HEADLINE, ABOUT, CODE, rows, setting, columns, link, other)


def _page(
    pipe: Any, name: str, prompt: str, methods: list[Any], out: Path, intro: Intro, track: Track,
    judge: Callable[..., Any] | None,
) -> None:  # fmt: skip
    known, cpu = MODELS[name], pipe.device.type == "cpu"
    side = known.sides[cpu and known.frames is not None]  # images have the size of the LoRA
    rounds = 1 if cpu else 3  # one round is too few for a time, which the page then leaves out
    request = Request(prompt, (side, side), STEPS, known.guidance, 0, frames=known.frames)
    settings = {"prompt": prompt, "size": f"{side} x {side} px", "steps": str(STEPS), "device": str(pipe.device)}
    comparison(pipe, request, methods, out, settings=settings, judge=judge, rounds=rounds, track=track, intro=intro)
