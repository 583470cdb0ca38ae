# pyright: basic, reportPrivateImportUsage=false
"""Scores of the settings that the documentation recommends, on held-out captions and on photographs.

python -m lab.quality.recommended captions --size 256 --prompts 500 --batch 32
python -m lab.quality.recommended photographs --size 256

The photographs are those of scikit-image, cropped to squares. The built-in model continues from each with noise on it,
dense and with each method, from the same noise and without a caption.
"""

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any
from zlib import crc32

import torch
import typer
from diffusers import FluxImg2ImgPipeline
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table
from skimage import data
from torch.nn.functional import cosine_similarity

from foveate import LLSA, HilbertA, ToMA
from foveate.apps.console import progress
from foveate.apps.demo import LORAS
from foveate.apps.demo.efficientnet import load_efficientnet
from foveate.apps.demo.evaluate import evaluate
from foveate.apps.demo.text import TEXT_TOKENS
from foveate.methods import ToFu, ToMeSD
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import MethodLike, using
from foveate.pipelines.request import Request, denoiser, fingerprint, load_pipeline
from foveate.tuning.similarity import psnr, ssim
from foveate.utils.device import choose_device, dtype_name, versions
from foveate.utils.files import claim, slug
from foveate.utils.progress import Track
from foveate.utils.timing import now
from foveate_models import find
from lab.quality.common import Batch, Commit, Pictures, Size, save_result
from lab.quality.quality import load_distilled

STEPS, SEED = 20, 0
RUN: dict[str, Any] = {"strength": 0.4, "num_inference_steps": STEPS, "prompt": ""}  # image to image: the last 8 steps
PHOTOGRAPHS = "astronaut", "chelsea", "coffee", "rocket"  # they are in scikit-image's wheel
UNTRAINED: list[MethodLike] = [
    ToMA(keep=0.75),
    ToMA(keep=0.5),
    ToMeSD(keep=0.5),
    ToFu(keep=0.5),
    LLSA(top_k=16, start_percent=0.4),
    HilbertA(tiles=4, start_percent=0.6),
]


def main(
    study: Annotated[str, typer.Argument(help="captions or photographs.")],
    size: Size = 256,
    prompts: Annotated[int, typer.Option(help="Held-out captions, or photographs: 4 at most.")] = 500,
    batch: Batch = 1,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "out/recommended",
    commit: Commit = "",
) -> None:
    """Generate, score and write the results."""
    if study not in ("captions", "photographs"):
        raise typer.BadParameter(f"unknown study {study!r}: choose from captions, photographs")
    out, groups = Path(pictures) / f"{study}-{size}px", pipelines(device, dtype)
    with progress() as track:
        if study == "captions":
            result = on_captions(groups, out, size, prompts, batch, track)
        else:
            result = on_photographs(groups, out, size, PHOTOGRAPHS[:prompts], track)
    name = "recommended" if study == "captions" else study
    save_result(f"{name}-{choose_device(device).type}-{size}px", result, commit)
    table = Table("", "PSNR", "SSIM", "EfficientNet", "s per image")
    for score in result["scores"]:
        cells = (score.get(field) for field in ("psnr", "ssim", "efficientnet", "seconds"))
        values = (cell["value"] if isinstance(cell, dict) else cell for cell in cells)
        table.add_row(score["label"], *("" if value is None else f"{value:.4g}" for value in values))
    Console().print(table)


def pipelines(device: str, dtype: str) -> Iterator[tuple[Any, list[MethodLike]]]:
    """The built-in model with methods that need no training, then with each of its LoRAs and the method of that."""
    for lora in ("", *LORAS.values()):
        pipe: Any = load_pipeline(str(find("pipeline")), device, dtype)
        yield pipe, [load_distilled(pipe, str(find(lora)))] if lora else UNTRAINED


def on_captions(
    groups: Iterator[tuple[Any, list[MethodLike]]], out: Path, size: int, prompts: int, batch: int, track: Track
) -> dict[str, Any]:
    """Scores of `evaluate`."""
    result: dict[str, Any] = {}
    for pipe, methods in groups:
        request = Request("", (size, size), STEPS, None, SEED)
        evaluate(pipe, methods, out, prompts=prompts, request=request, batch=batch, track=track)
        scored = json.loads((out / "scores.json").read_text())
        result = result | scored | {"scores": result.get("scores", scored["scores"][:2]) + scored["scores"][2:]}
    return result


def on_photographs(
    groups: Iterator[tuple[Any, list[MethodLike]]], out: Path, size: int, names: Sequence[str], track: Track
) -> dict[str, Any]:
    """Means over the photographs, each compared with its dense result."""
    given = {name: ImageOps.fit(Image.fromarray(getattr(data, name)()), (size, size)) for name in names}
    scores, settings, dense = list[dict[str, Any]](), dict[str, Any](), list[Image.Image]()
    for pipe, methods in groups:
        settings = {
            "weights": fingerprint(denoiser(pipe)),
            "dtype": dtype_name(pipe.dtype),
            "size": size,
            "seed": SEED,
            **RUN,
        }
        claim(out, {name: str(value) for name, value in settings.items()})
        features = load_efficientnet(pipe.device)
        for method in methods if dense else (None, *methods):
            label = method.title if method else "dense"
            made, seconds = drawn(pipe, method, given, out, track(label, len(given)))
            scores.append({"label": label, "seconds": median(seconds)})
            if method is None:
                dense = made
                continue
            pairs = [*zip(made, dense, strict=True)]
            each = {
                "psnr": [psnr(*pair) for pair in pairs],
                "ssim": [ssim(*pair) for pair in pairs],
                "efficientnet": (1 - cosine_similarity(features(made), features(dense))).tolist(),
            }
            if inf in each["psnr"]:
                raise ValueError(f"{label} stays dense at {size} px: leave it out")
            scores[-1] |= {name: mean(values) for name, values in each.items()}
            scores[-1]["each"] = [dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)]
    return {"settings": settings, "photographs": names, "versions": versions(), "scores": scores}


def drawn(
    pipe: Any, method: MethodLike | None, given: dict[str, Image.Image], out: Path, advance: Any
) -> tuple[list[Image.Image], list[float]]:
    """Results for the photographs and their seconds. Existing results are not generated again."""
    painter: Any = FluxImg2ImgPipeline.from_pipe(pipe)
    painter.set_progress_bar_config(disable=True)
    folder = out / (f"{slug(method.title)}-{crc32(repr(method).encode()):08x}" if method else "dense")
    made, seconds = list[Image.Image](), list[float]()
    for name, photograph in given.items():
        if not (path := folder / f"{name}.png").exists():
            with using(painter, method):
                began = now(pipe.device)
                image = painter(
                    image=photograph,
                    height=photograph.height,
                    width=photograph.width,
                    max_sequence_length=TEXT_TOKENS,
                    generator=torch.Generator("cpu").manual_seed(SEED),
                    **RUN,
                ).images[0]
                write_picture(path, image, {"seconds": f"{now(pipe.device) - began:.4f}"})
        with Image.open(path) as image:
            seconds.append(float(image.info["seconds"]))
            made.append(image.convert("RGB"))
        advance()
    return made, seconds


if __name__ == "__main__":
    typer.run(main)
