# pyright: basic
"""Scores of methods on held-out captions: the recogniser judges the generated images."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoImageProcessor, AutoModel

from foveate.apps.demo import find
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.efficientnet import load_efficientnet, why_missing
from foveate.apps.demo.recogniser import FrechetDistance, Recogniser, judge, load_recogniser, recognise
from foveate.apps.demo.scenes import Scene, Scenes, render, scenes
from foveate.apps.demo.text import draws_scenes
from foveate.apps.errors import noting
from foveate.diffusers.apply import Handle
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import MethodLike, throughout, using
from foveate.pipelines.request import Request, denoiser, draw, draw_batch, fingerprint, makes_video
from foveate.plots.figures import draw_sheet, figure_png
from foveate.tuning.similarity import psnr, ssim
from foveate.utils.device import dtype_name, versions
from foveate.utils.files import claim, slug, write_whole
from foveate.utils.processes import check_shared, divide, join
from foveate.utils.progress import Track, silent

__all__ = ["Interval", "Score", "evaluate", "load_dino", "score_table"]

RESAMPLES, FRECHET_RESAMPLES = 1000, 100
DINO_BATCH = 32
SHOWN = 8  # prompts on the sheet of samples
HEADINGS = {
    "objects": "objects",
    "relations": "relations",
    "extra": "extra objects",
    "frechet": "Fréchet",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "distance": "distance",
    "efficientnet": "EfficientNet distance",
    "efficientnet_frechet": "EfficientNet Fréchet",
    "seconds": "s per image",
    "flop_bound": "FLOP bound",
}


class Interval(NamedTuple):
    """A mean and its 95 % interval, by bootstrap over the prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def within(self, least: float, most: float) -> "Interval":
        """The interval, clipped to a range."""
        return Interval(*(min(max(end, least), most) for end in self))


class Score(NamedTuple):
    """Measurements of one set of images.

    Attributes:
        label: "real" for renderings of the captions, "dense", or the method.
        objects: Fraction of the requested objects that the recogniser finds. This and the other scores of the
            recogniser are None for models with other captions.
        relations: Fraction of the requested relations that hold; None if none was requested.
        extra: Unrequested or repeated objects per image.
        frechet: Frechet distance of the recogniser's features from the features of real renderings.
        psnr: PSNR to the dense image of the same seed, in dB; None for real and dense images.
        ssim: SSIM to the dense image; None for real and dense images.
        distance: 1 - cosine similarity to the dense image's features; None for real and dense images.
        efficientnet: The same with the features of EfficientNet-Lite0; None without its packages.
        efficientnet_frechet: Frechet distance of the features of EfficientNet-Lite0 from those of real renderings;
            None without its packages, and for models with other captions.
        seconds: Median time of an image; None for real ones.
        flop_bound: FLOPs of dense attention divided by FLOPs of this method.
    """

    label: str
    objects: Interval | None
    relations: Interval | None
    extra: Interval | None
    frechet: Interval | None
    psnr: Interval | None
    ssim: Interval | None
    distance: Interval | None
    efficientnet: Interval | None
    efficientnet_frechet: Interval | None
    seconds: float | None
    flop_bound: float


def evaluate(
    pipeline: Any,
    methods: Sequence[MethodLike],
    out: Path,
    *,
    prompts: int,
    request: Request,
    batch: int = 1,
    dino: str = "",
    left_out: Callable[[str], None] | None = None,
    track: Track = silent,
) -> list[Score]:
    """Generate held-out captions dense and with every method, and score the images.

    Writes scores.json and sheet.png into `out`. Existing images are kept. Several processes divide the images;
    the main process scores them, and the others return no scores.

    Args:
        pipeline: The built-in model, or a model that was trained on its captions.
        methods: Methods, each compared with dense.
        out: Folder for images and results.
        prompts: Number of captions.
        request: Size, steps, guidance scale and first seed; its prompt is not used.
        batch: Batch size.
        dino: Hub id or folder of a DINO model for the distance to dense images; empty: the recogniser.
        left_out: Called with a message for every method that does not fit or stays dense; None makes it an error.
        track: Shows progress.

    Raises:
        ValueError: If the model makes videos, `out` holds images of other settings, a method does not fit or stays
            dense, or the DINO model cannot be loaded.
    """
    if makes_video(pipeline):
        raise ValueError(
            f"the recogniser knows images, and {type(pipeline).__name__} makes videos: use an image model"
        )
    side = request.size[0]
    if request.size[1] != side:
        raise ValueError(f"the recogniser knows square images, not {request.size[1]} x {request.size[0]} px")
    model = str(pipeline.config.get("_name_or_path", ""))
    settings = {
        "model": "built-in" if model == str(find("pipeline")) else model,
        "weights": fingerprint(denoiser(pipeline)),
        "size": side,
        "steps": request.steps,
        "guidance": request.guidance,
        "seed": request.seed,
        "dtype": dtype_name(pipeline.dtype),
    }
    wanted = list(islice(scenes(request.seed, evaluation=True), prompts))
    requests = [request._replace(prompt=scene.caption, seed=request.seed + i) for i, scene in enumerate(wanted)]
    scored = [method for method in methods if _fits(pipeline, method, requests[0], left_out)]
    state = join()
    check_shared(out)
    with state.main_process_first():
        claim(out, {name: str(value) for name, value in settings.items()})
    describe = load_dino(dino, pipeline.device) if dino else None
    efficientnet = None if why_missing() else load_efficientnet(pipeline.device)
    judged = draws_scenes(pipeline)
    atlas = load_atlas()
    pictures = (render(atlas, Scenes.of([scene]), side)[0].permute(1, 2, 0) * 255 for scene in wanted)
    sets = [_Pictures("real", [Image.fromarray(picture.round().byte().numpy()) for picture in pictures], [], 1.0)]
    labels = ["dense", *(method.title for method in scored)]
    folders = ["dense", *(f"{slug(method.title)}-{crc32(repr(method).encode()):08x}" for method in scored)]
    paths = [[out / folder / f"{index:05}.png" for index in range(prompts)] for folder in folders]
    missing = [[index for index, path in enumerate(files) if not path.exists()] for files in paths]
    mine = [divide(indices) for indices in missing]  # before anything is generated
    for method, label, files, left, part in zip((None, *scored), labels, paths, missing, mine, strict=True):
        advance, done = track(label, prompts - len(left) + len(part)), prompts - len(left)
        for _ in range(done):
            advance()
        _draw(pipeline, method, [(files[index], requests[index]) for index in part], batch, advance)
    state.wait_for_everyone()
    if not state.is_main_process:
        return []
    sets += [_read(label, files) for label, files in zip(labels, paths, strict=True)]
    recogniser, advance = load_recogniser(device=pipeline.device), track("scoring", len(sets))
    scores = _scores(sets, wanted, recogniser, describe, efficientnet, advance)
    if not judged:
        unjudged: dict[str, Any] = dict.fromkeys(
            ("objects", "relations", "extra", "frechet", "efficientnet_frechet", *([] if dino else ["distance"]))
        )
        scores, sets = [score._replace(**unjudged) for score in scores[1:]], sets[1:]
    content = {
        "settings": settings,
        "prompts": prompts,
        "distance": dino or ("recogniser" if judged else None),
        "versions": versions(),
        "scores": [_for_json(score) for score in scores],
    }
    write_whole(out / "scores.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    sheet = draw_sheet({one.label: one.pictures[:SHOWN] for one in sets}, [r.prompt for r in requests[:SHOWN]])
    write_whole(out / "sheet.png", figure_png(sheet, dpi=80))
    return scores


def score_table(scores: Sequence[Score]) -> Table:
    """Table of the scores for the terminal, with a column for each set of images."""
    table = Table(box=SIMPLE, show_edge=False, padding=0)
    for label in ("", *(score.label for score in scores)):
        table.add_column(label, overflow="fold")
    for field, name in HEADINGS.items():
        cells = [getattr(score, field) for score in scores]
        if all(cell is None for cell in cells):
            continue
        table.add_row(name, *("" if c is None else str(c) if isinstance(c, Interval) else f"{c:.3g}" for c in cells))
    return table


def _for_json(cell: Any) -> Any:
    """A score as a dictionary; infinity, which JSON lacks, becomes None: the PSNR of identical images."""
    if isinstance(cell, Score | Interval):
        return {name: _for_json(value) for name, value in cell._asdict().items()}
    return None if cell == inf else cell


# --- generate ---


class _Pictures(NamedTuple):
    label: str
    pictures: list[Image.Image]
    seconds: list[float]
    flop_bound: float


def _read(label: str, paths: Sequence[Path]) -> _Pictures:
    pictures: list[Image.Image] = []
    about: list[dict[Any, Any]] = []
    for path in paths:
        with Image.open(path) as picture:
            about.append(dict(picture.info))
            pictures.append(picture.convert("RGB"))
    return _Pictures(label, pictures, [float(one["seconds"]) for one in about], float(about[0]["flop bound"]))


def _fits(pipeline: Any, method: MethodLike, request: Request, left_out: Callable[[str], None] | None) -> bool:
    """Whether a method works at this size, from one denoising step."""
    try:
        with using(pipeline, throughout(method)) as run:
            draw(pipeline, request._replace(steps=1))
            if method.parts:  # else it is a preset with a step cache alone
                _sparsity(method, run)
    except ValueError as error:
        if left_out is None:
            raise
        left_out(f"{method.title} is left out: {error}")
        return False
    return True


def _draw(
    pipeline: Any,
    method: MethodLike | None,
    missing: Sequence[tuple[Path, Request]],
    batch: int,
    advance: Callable[[], None],
) -> None:
    """Generate the missing images. The time of a batch is divided equally among its images."""
    with using(pipeline, method) as run:
        for start in range(0, len(missing), batch):
            paths, requests = zip(*missing[start : start + batch], strict=True)
            began = time.perf_counter()
            with noting(f"generating {requests[0].prompt!r} for {paths[0]}"):
                images = draw_batch(pipeline, requests)
            seconds = (time.perf_counter() - began) / len(paths)
            about = {"seconds": f"{seconds:.4f}", "flop bound": f"{1 / (1 - _sparsity(method, run)):.3f}"}
            for path, request, image in zip(paths, requests, images, strict=True):
                write_picture(path, image, {"prompt": request.prompt, **about})
                advance()


def _sparsity(method: MethodLike | None, run: Handle | None) -> float:
    """Fraction of skipped query-key pairs, mean over all layers and steps, dense and skipped ones included.

    Raises:
        ValueError: If the method stays dense in every step.
    """
    if method is None or run is None:
        return 0.0
    summary = run.summary()
    layers, forwards = summary.layers, sum(summary.outcomes.values(), Counter[str]())
    if method.parts and all(layer.why for layer in layers):
        raise ValueError(f"{layers[0].why}: {method.title} would only repeat dense here, leave it out")
    skipped = sum(summary.skipped.values())
    in_skipped = 1 - len(summary.models) / len(layers)  # the first layer is computed
    in_sparse = sum(passes * share for settings in summary.settings.values() for passes, share in settings.values())
    return (skipped * in_skipped + in_sparse) / (skipped + forwards.total())


# --- score ---


def _scores(
    sets: list[_Pictures],
    wanted: Sequence[Scene],
    recogniser: Recogniser,
    describe: Callable[[Sequence[Image.Image]], Tensor] | None,
    efficientnet: Callable[[Sequence[Image.Image]], Tensor] | None,
    advance: Callable[[], None],
) -> list[Score]:
    """The scores of every set; the first set is real, the second dense."""
    resampled = np.random.default_rng(0).integers(len(wanted), size=(RESAMPLES, len(wanted)))

    def average(values: Sequence[float], weights: Sequence[int] | None = None) -> Interval:
        number, weight = np.array(values, float), np.array(weights or [1] * len(values))
        totals = weight[resampled].sum(1)
        return _interval(number.sum() / weight.sum(), number[resampled].sum(1)[totals > 0] / totals[totals > 0])

    def to_dense(measure: Callable[[Image.Image, Image.Image], float], pictures: list[Image.Image]) -> Interval:
        with ThreadPoolExecutor() as pool:  # SSIM takes longer than all other scores
            return average(list(pool.map(measure, pictures, sets[1].pictures)))

    def from_dense(features: Tensor, dense: Tensor) -> Interval:
        return average((1 - cosine_similarity(features, dense)).tolist()).within(0, 2)

    scores: list[Score] = []
    of_real = of_dense = network_of_real = network_of_dense = torch.empty(0)
    for number, one in enumerate(sets):
        pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in one.pictures]).permute(0, 3, 1, 2)
        found, features = recognise(recogniser, pixels)
        described = describe(one.pictures) if describe else features
        by_network = efficientnet(one.pictures) if efficientnet else torch.empty(0)
        if number == 0:
            of_real, network_of_real = features.cpu(), by_network.cpu()
        if number == 1:
            of_dense, network_of_dense = described, by_network
        verdicts = [judge(detections, scene) for detections, scene in zip(found, wanted, strict=True)]
        relations = [verdict.relations for verdict in verdicts]
        compared = number > 1
        scores.append(
            Score(
                one.label,
                average([v.objects_found for v in verdicts], [v.objects for v in verdicts]).within(0, 1),
                average([v.relations_held for v in verdicts], relations).within(0, 1) if any(relations) else None,
                average([v.extra for v in verdicts]).within(0, inf),
                _frechet(features.cpu(), of_real, resampled),
                to_dense(psnr, one.pictures) if compared else None,
                to_dense(ssim, one.pictures).within(-1, 1) if compared else None,
                from_dense(described, of_dense) if compared else None,
                from_dense(by_network, network_of_dense) if efficientnet and compared else None,
                _frechet(by_network.cpu(), network_of_real, resampled) if efficientnet else None,
                median(one.seconds) if one.seconds else None,
                one.flop_bound,
            )
        )
        advance()
    return scores


def _frechet(features: Tensor, real: Tensor, resampled: np.ndarray) -> Interval:
    few = torch.from_numpy(resampled[:FRECHET_RESAMPLES])
    distance = FrechetDistance(real)
    return _interval(distance(features), np.array([distance(features[i]) for i in few])).within(0, inf)


def _interval(value: float, resamples: np.ndarray) -> Interval:
    """The middle 95 % of the resamples, centred on the value because resampling adds a bias."""
    if not np.isfinite(resamples).all():  # the PSNR of identical images
        return Interval(value, value, value)
    low, high = np.quantile(resamples - resamples.mean(), (0.025, 0.975))
    return Interval(float(value), float(value + low), float(value + high))


def load_dino(model: str, device: torch.device) -> Callable[[Sequence[Image.Image]], Tensor]:
    """Return a function from images to class tokens [images, dim] of a DINO or DINOv2 model, as papers on merging use.

    Args:
        model: Hub id or folder, for example "facebook/dino-vits16".
        device: Device; the dtype is float32.

    Raises:
        ValueError: If the model cannot be loaded.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(model, use_fast=False)
        network = AutoModel.from_pretrained(model).to(device).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error

    @torch.no_grad()
    def features(pictures: Sequence[Image.Image]) -> Tensor:
        parts = [
            processor(images=list(pictures[start : start + DINO_BATCH]), return_tensors="pt").to(device)
            for start in range(0, len(pictures), DINO_BATCH)
        ]
        return torch.cat([network(**part).last_hidden_state[:, 0] for part in parts])

    return features
