# pyright: basic
"""How good a method's pictures are: held-out captions drawn, and judged by the built-in model's own yardstick."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity

from foveate.demo import PIPELINE
from foveate.demo.atlas import load_atlas
from foveate.demo.dino import load_dino
from foveate.demo.recogniser import FrechetDistance, Recogniser, judge, load_recogniser, recognise
from foveate.demo.scenes import Scene, Scenes, render, scenes
from foveate.diffusers.apply import Handle
from foveate.diffusers.lora import MethodLike, throughout, using
from foveate.diffusers.pipelines import Request, denoiser, draw, draw_batch, fingerprint
from foveate.utils.device import versions
from foveate.utils.files import claim, slug, write_picture, write_whole
from foveate.utils.progress import Track, silent
from foveate.web.report import draw_sheet, figure_png, psnr, ssim

__all__ = ["Interval", "Score", "evaluate", "score_table"]

RESAMPLES, FRECHET_RESAMPLES = 1000, 100
SHOWN = 8  # prompts on the sheet
HEADINGS = {
    "objects": "objects",
    "relations": "relations",
    "extra": "extra objects",
    "frechet": "Fréchet",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "distance": "distance",
    "seconds": "s a picture",
    "flop_bound": "FLOP bound",
}


class Interval(NamedTuple):
    """A number and the 95 % interval that a bootstrap over the prompts gives it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def within(self, least: float, most: float) -> "Interval":
        """What of it lies in the range of what was measured."""
        return Interval(*(min(max(end, least), most) for end in self))


class Score(NamedTuple):
    """What was measured of one way to draw.

    Attributes:
        label: "real" renderings of the captions, "dense", or the method.
        objects: Fraction of the requested objects that the recogniser finds.
        relations: Fraction of the requested relations that hold between objects found; None if none was requested.
        extra: Objects a picture shows beyond those: nobody asked for them, or they are repeated.
        frechet: Frechet distance of the recogniser's features to those of the real renderings.
        psnr: Against the dense picture of the same seed, in dB; None where that says nothing.
        ssim: Likewise.
        distance: 1 - cosine between its features and the dense picture's.
        seconds: Median time of a picture; None for real ones.
        flop_bound: FLOPs of dense attention over those of this one.
    """

    label: str
    objects: Interval
    relations: Interval | None
    extra: Interval
    frechet: Interval
    psnr: Interval | None
    ssim: Interval | None
    distance: Interval | None
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
    """Draw held-out captions dense and with every method, and score them; scores.json and sheet.png go into `out`.

    Pictures that lie in `out` are not drawn again, so a run that was broken off goes on where it was.

    Args:
        pipeline: The built-in model, or one that knows its captions.
        methods: Each one alone is compared with dense.
        out: Folder of the pictures and the results.
        prompts: How many captions.
        request: Size, steps, guidance and the first seed; its prompt is not used.
        batch: Pictures drawn together.
        dino: Hub id or folder of a DINO model, for the distance to dense pictures. Empty takes the recogniser.
        left_out: Told of every method that cannot run at this size or stays dense; without it that is an error.
        track: Shows progress.

    Raises:
        ValueError: If `out` holds pictures of other settings, a method cannot run at this size or stays dense, or
            there is no such DINO model.
    """
    if request.size[0] != request.size[1]:
        raise ValueError(f"the yardstick knows square pictures, not {request.size[1]} x {request.size[0]} px")
    model = str(pipeline.config.get("_name_or_path", ""))
    settings = {
        "model": "built-in" if model == str(PIPELINE) else model,
        "weights": fingerprint(denoiser(pipeline)),
        "size": request.size[0],
        "steps": request.steps,
        "guidance": request.guidance,
        "seed": request.seed,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
    }
    wanted = list(islice(scenes(request.seed, evaluation=True), prompts))
    requests = [request._replace(prompt=scene.caption, seed=request.seed + i) for i, scene in enumerate(wanted)]
    judged = [way for way in methods if not _refused(pipeline, way, requests[0], left_out)]
    claim(out, {name: str(value) for name, value in settings.items()})
    describe = load_dino(dino, pipeline.device) if dino else None
    drawn = [_Drawn("real", _renderings(wanted, request.size[0]), [], 1.0)]
    for method in (None, *judged):
        label = method.title if method else "dense"
        folder = out / (f"{slug(label)}-{crc32(repr(method).encode()):08x}" if method else label)
        _draw_missing(pipeline, method, requests, folder, batch, track(label, prompts))
        drawn.append(_Drawn.of(label, folder, prompts))
    recogniser = load_recogniser(device=pipeline.device)
    scores = _scores(drawn, wanted, recogniser, describe, track("scoring", len(drawn)))
    content = {
        "settings": settings,
        "prompts": prompts,
        "distance": dino or "recogniser",
        "versions": versions(),
        "scores": [_plain(score) for score in scores],
    }
    write_whole(out / "scores.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    sheet = draw_sheet({one.label: one.pictures[:SHOWN] for one in drawn}, [r.prompt for r in requests[:SHOWN]])
    write_whole(out / "sheet.png", figure_png(sheet, dpi=80))
    return scores


def score_table(scores: Sequence[Score]) -> Table:
    """The scores, to print: a column for each way to draw. Where room is scarce cells take more lines, all digits."""
    table = Table(box=SIMPLE, show_edge=False, padding=0)
    for label in ("", *(score.label for score in scores)):
        table.add_column(label, overflow="fold")
    for field, name in HEADINGS.items():
        cells = (getattr(score, field) for score in scores)
        table.add_row(name, *("" if c is None else str(c) if isinstance(c, Interval) else f"{c:.3g}" for c in cells))
    return table


def _refused(pipeline: Any, way: MethodLike, request: Request, left_out: Callable[[str], None] | None) -> bool:
    """Whether a method is left out; one step tells, before hours go into the pictures of the others."""
    try:
        with using(pipeline, throughout(way)) as run:
            draw(pipeline, request._replace(steps=1))
            _sparsity(way, run)
    except ValueError as error:
        if left_out is None:
            raise
        left_out(f"{way.title} is left out: {error}")
        return True
    return False


def _plain(cell: Any) -> Any:
    """For JSON, which has no infinity: the PSNR of pictures that are identical is null."""
    if isinstance(cell, Score | Interval):
        return {name: _plain(value) for name, value in cell._asdict().items()}
    return None if cell == inf else cell


class _Drawn(NamedTuple):
    """The pictures of one way to draw."""

    label: str
    pictures: list[Image.Image]
    seconds: list[float]
    flop_bound: float

    @classmethod
    def of(cls, label: str, folder: Path, prompts: int) -> "_Drawn":
        pictures: list[Image.Image] = []
        about: list[dict[Any, Any]] = []
        for index in range(prompts):
            with Image.open(_path(folder, index)) as picture:
                about.append(dict(picture.info))
                pictures.append(picture.convert("RGB"))
        return cls(label, pictures, [float(one["seconds"]) for one in about], float(about[0]["flop bound"]))


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.png"


def _draw_missing(
    pipeline: Any,
    method: MethodLike | None,
    requests: list[Request],
    folder: Path,
    batch: int,
    advance: Callable[[], None],
) -> None:
    """Write the pictures that are not there yet; each carries its time, that of a batch shared evenly."""
    missing = [index for index in range(len(requests)) if not _path(folder, index).exists()]
    for _ in range(len(requests) - len(missing)):
        advance()
    with using(pipeline, method) as run:
        for start in range(0, len(missing), batch):
            part, began = missing[start : start + batch], time.perf_counter()
            images = draw_batch(pipeline, [requests[index] for index in part])
            seconds = (time.perf_counter() - began) / len(part)
            about = {"seconds": f"{seconds:.4f}", "flop bound": f"{1 / (1 - _sparsity(method, run)):.3f}"}
            for index, image in zip(part, images, strict=True):
                write_picture(_path(folder, index), image, {"prompt": requests[index].prompt, **about})
                advance()


def _sparsity(way: MethodLike | None, run: Handle | None) -> float:
    """Fraction of the query-key pairs left out, mean over layers and steps: also those in which nothing is.

    Raises:
        ValueError: If nothing is in any step.
    """
    if way is None or run is None:
        return 0.0
    summary = run.summary()
    layers, forwards = summary.layers, sum(summary.outcomes.values(), Counter[str]())
    if all(layer.why for layer in layers):
        raise ValueError(f"{layers[0].why}: {way.title} would only repeat dense here, leave it out")
    return mean(layer.true for layer in layers) * forwards[""] / forwards.total()


def _renderings(wanted: Sequence[Scene], side: int) -> list[Image.Image]:
    atlas = load_atlas()
    pictures = (render(atlas, Scenes.of([scene]), side)[0] for scene in wanted)
    return [Image.fromarray((picture.permute(1, 2, 0) * 255).round().byte().numpy()) for picture in pictures]


def _scores(
    drawn: list[_Drawn],
    wanted: Sequence[Scene],
    recogniser: Recogniser,
    describe: Callable[[Sequence[Image.Image]], Tensor] | None,
    advance: Callable[[], None],
) -> list[Score]:
    real, dense = drawn[:2]
    chance = np.random.default_rng(0)
    resampled = chance.integers(len(wanted), size=(RESAMPLES, len(wanted)))

    def average(values: Sequence[float], weights: Sequence[int] | None = None) -> Interval:
        number, weight = np.array(values, float), np.array(weights or [1] * len(values))
        totals = weight[resampled].sum(1)
        return _interval(number.sum() / weight.sum(), number[resampled].sum(1)[totals > 0] / totals[totals > 0])

    reference = of_dense = torch.empty(0)
    scores: list[Score] = []
    for one in drawn:
        pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in one.pictures]).permute(0, 3, 1, 2)
        found, features = recognise(recogniser, pixels)
        reference = features if one is real else reference
        described = describe(one.pictures) if describe else features
        of_dense = described if one is dense else of_dense
        verdicts = [judge(detections, scene) for detections, scene in zip(found, wanted, strict=True)]
        relations = [verdict.relations for verdict in verdicts]
        near = one is not real and one is not dense
        scores.append(
            Score(
                one.label,
                average([v.objects_found for v in verdicts], [v.objects for v in verdicts]).within(0, 1),
                average([v.relations_held for v in verdicts], relations).within(0, 1) if any(relations) else None,
                average([v.extra for v in verdicts]).within(0, inf),
                _frechet(features.cpu(), reference.cpu(), resampled),
                average(_each(psnr, one, dense)) if near else None,
                average(_each(ssim, one, dense)).within(-1, 1) if near else None,
                average((1 - cosine_similarity(described, of_dense)).tolist()).within(0, 2) if near else None,
                median(one.seconds) if one.seconds else None,
                one.flop_bound,
            )
        )
        advance()
    return scores


def _each(measure: Callable[[Image.Image, Image.Image], float], one: _Drawn, other: _Drawn) -> list[float]:
    """Of every picture and the other's; SSIM takes longest of all scores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(measure, one.pictures, other.pictures))


def _frechet(ours: Tensor, real: Tensor, resampled: np.ndarray) -> Interval:
    few = torch.from_numpy(resampled[:FRECHET_RESAMPLES])
    distance = FrechetDistance(real)
    return _interval(distance(ours), np.array([distance(ours[i]) for i in few])).within(0, inf)


def _interval(value: float, resamples: np.ndarray) -> Interval:
    """The middle 95 % of the resamples, moved so that they lie around the value: resampling adds a bias of its own."""
    if not np.isfinite(resamples).all():  # the PSNR of pictures that are identical
        return Interval(value, value, value)
    low, high = np.quantile(resamples - resamples.mean(), (0.025, 0.975))
    return Interval(float(value), float(value + low), float(value + high))
