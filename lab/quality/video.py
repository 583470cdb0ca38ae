# pyright: basic
"""Score dense and sparse videos of the built-in model, or of another model trained by `python -m lab video`.

python -m lab.quality.video --batch 40                      # the built-in model
python -m lab.quality.video --batch 40 --lora distilled     # with a LoRA of foveate distill
python -m lab.quality.video --model video-run/pipeline
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cosine_similarity

from foveate import LLSA, HilbertA, ToMA
from foveate.apps.console import progress
from foveate.apps.demo import MODELS
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.efficientnet import load_efficientnet
from foveate.apps.demo.recogniser import Detection, Recogniser, judge, load_recogniser, recognise
from foveate.apps.web.compare import showcase
from foveate.methods.base import sparse_and_merging
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import MethodLike, throughout, using
from foveate.pipelines.request import Request, denoiser, draw_batch, fingerprint, load_pipeline
from foveate.plots.figures import draw_sheet, figure_png
from foveate.tuning.similarity import psnr
from foveate.utils.device import versions
from foveate.utils.files import claim, slug, write_whole
from foveate.utils.progress import Track
from lab.quality.common import SHEETS, Batch, Commit, Pictures, Prompts, save_result
from lab.quality.quality import load_distilled
from lab.training.moving import DISTANCE, MovingScene, frame_scenes, moving_scenes, render_frames

__all__ = ["VideoVerdict", "judge_video"]

SHOWN = 4  # videos on the sheet
LATE = 0.2, 0.4  # fractions of the steps that stay dense before a method


class VideoVerdict(NamedTuple):
    """Agreement of a video with its moving scene.

    Attributes:
        found: Number of the scene's objects that appear in more than half of the frames.
        objects: Number of the scene's objects.
        moves: Whether the object that should move moves in the right direction.
        extra: Mean number of wrong or repeated objects in a frame.
    """

    found: int
    objects: int
    moves: bool
    extra: float


def judge_video(frames: Sequence[Sequence[Detection]], moving: MovingScene) -> VideoVerdict:
    """Verdict on a video, from the objects found in each frame.

    An object moves in the right direction if it appears in the first and the last third of the video, and in between
    moves at least half of its path, and sideways at most half as far.
    """
    places = [{one.object: (one.x, one.y) for one in frame} for frame in frames]
    found = sum(sum(index in place for place in places) > len(places) / 2 for index in moving.scene.objects)
    third = max(1, len(places) // 3)
    ends = [[p[moving.scene.objects[0]] for p in part if moving.scene.objects[0] in p]
            for part in (places[:third], places[-third:])]  # fmt: skip
    moves = False
    if all(ends):
        way = np.array(moving.ways[0]) / DISTANCE
        # the middles of the first and the last third are two thirds of the way apart
        went = np.subtract(*(np.mean(end, 0) for end in reversed(ends))) / (2 / 3)
        along, across = float(went @ way), float(abs(went @ way[::-1]))
        moves = along > DISTANCE / 2 and across < along / 2
    extra = mean(judge(frame, moving.scene).extra for frame in frames)
    return VideoVerdict(found, len(moving.scene.objects), moves, extra)


def main(
    model: Annotated[str, typer.Option(help="Pipeline folder, or built-in-video.")] = "built-in-video",
    side: Annotated[int, typer.Option(help="Side of the videos in pixels.")] = 96,
    frames: Annotated[int, typer.Option(help="Frames of a video.")] = 17,
    prompts: Prompts = 200,
    batch: Batch = 1,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = 3.0,
    lora: Annotated[str, typer.Option(help="LoRA distilled for a method: its file or folder.")] = "",
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "eval-video",
    commit: Commit = "",
) -> None:
    """Generate, score and write the results."""
    source, out = str(MODELS[model].folder) if model in MODELS else model, Path(pictures)
    pipeline = load_pipeline(source, device, dtype)
    request = Request("", (side, side), 20, guidance, 0, frames=frames)
    settings: dict[str, Any] = {
        "model": model,
        "weights": fingerprint(denoiser(pipeline)),
        "side": side,
        "frames": frames,
        "steps": 20,
        "guidance": guidance,
    }
    distilled = load_distilled(pipeline, lora) if lora else None
    methods: list[MethodLike] = [*showcase(), *_late(HilbertA(tiles=4)), *_late(LLSA(top_k=16))]
    if distilled:
        methods += [distilled, *_late(distilled)]
        with suppress(ValueError):  # tiles that slide diagonally do not fit token merging
            sparse_and_merging((*distilled.parts, ToMA(keep=0.5)))
            methods.append(distilled._replace(more=(ToMA(keep=0.5),)))
    claim(out, {name: str(value) for name, value in settings.items()})
    wanted = list(islice(moving_scenes(0, evaluation=True), prompts))
    with progress() as track:
        scores, shown = _scores(pipeline, methods, request, wanted, batch, out, track)
    result = {"settings": settings, "prompts": prompts, "batch": batch, "versions": versions(), "scores": scores}
    save_result(f"video-{pipeline.device.type}-{side}px", result, commit)
    captions = [moving.scene.caption for moving in wanted[:SHOWN]]
    write_whole(SHEETS / f"video-{side}px.webp", _moving_sheet(shown, captions))
    table = Table(*scores[0])
    for score in scores:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in score.values()))
    Console().print(table)


def _late(method: MethodLike) -> list[MethodLike]:
    return [throughout(method, start) for start in LATE]


def _moving_sheet(shown: dict[str, list[Image.Image]], captions: list[str]) -> bytes:
    """A looping WebP image of strips of frames in a grid: a row for each name, a column for each caption."""
    videos = {name: [_cut(strip) for strip in strips] for name, strips in shown.items()}
    drawn = [
        draw_sheet({name: [Image.fromarray(video[i]) for video in row] for name, row in videos.items()}, captions)
        for i in range(0, len(videos["dense"][0]), 2)
    ]
    first, *others = (Image.open(BytesIO(figure_png(figure, dpi=80))).convert("RGB") for figure in drawn)
    file = BytesIO()
    first.save(file, format="webp", save_all=True, append_images=others, duration=120, loop=0, quality=80)
    return file.getvalue()


def _scores(
    pipeline: Any,
    methods: Sequence[MethodLike],
    request: Request,
    wanted: Sequence[MovingScene],
    batch: int,
    out: Path,
    track: Track,
) -> tuple[list[dict[str, Any]], dict[str, list[Image.Image]]]:
    """A row of scores for real renderings, dense, and each method; and the strips of the first videos."""
    recogniser = load_recogniser(device=pipeline.device)
    atlas, frames = load_atlas(), request.frames or 1
    shown = [render_frames(atlas, frame_scenes([one], frames), frames, request.size[0])[0] for one in wanted]
    real = [_strip(_frames(video)) for video in shown]
    sets: dict[str, tuple[list[Image.Image], float]] = {"real": (real, 0.0)}
    for method in (None, *methods):
        label = method.title if method else "dense"
        folder = out / (f"{slug(label)}-{crc32(repr(method).encode()):08x}" if method else label)
        sets[label] = _drawn(pipeline, method, request, wanted, batch, folder, track(label, len(wanted)))
    scores: list[dict[str, Any]] = []
    dense = [_cut(strip) for strip in sets["dense"][0]]
    features = load_efficientnet(pipeline.device)
    of_dense = [features(_images(video)) for video in dense]
    for label, (strips, seconds) in sets.items():
        videos = [_cut(strip) for strip in strips]
        verdicts = [judge_video(_detect(recogniser, video), one) for video, one in zip(videos, wanted, strict=True)]
        scores.append({
            "label": label,
            "objects": sum(v.found for v in verdicts) / sum(v.objects for v in verdicts),
            "directions": mean(v.moves for v in verdicts),
            "extra": mean(v.extra for v in verdicts),
            "flicker": mean(map(_flicker, videos)) / mean(map(_flicker, dense)),
            "efficientnet": mean(
                float(1 - cosine_similarity(features(_images(video)), other).mean())
                for video, other in zip(videos, of_dense, strict=True)
            ),
            "psnr": mean(psnr(strip, other) for strip, other in zip(strips, sets["dense"][0], strict=True)),
            "seconds": seconds,
        })  # fmt: skip
        if label in ("real", "dense"):
            scores[-1] |= {"efficientnet": "", "psnr": ""}
    return scores, {label: strips[:SHOWN] for label, (strips, _) in sets.items()}


def _drawn(
    pipeline: Any,
    method: MethodLike | None,
    request: Request,
    wanted: Sequence[MovingScene],
    batch: int,
    folder: Path,
    advance: Callable[[], None],
) -> tuple[list[Image.Image], float]:
    """Videos as strips of frames, and the median of their seconds. Existing batches are not generated again."""
    strips, seconds = [], []
    requests = [request._replace(prompt=one.scene.caption, seed=seed) for seed, one in enumerate(wanted)]
    with using(pipeline, method):
        for first in range(0, len(requests), batch):
            drawn = requests[first : first + batch]
            paths = [folder / f"{one.seed:05}.png" for one in drawn]
            if not all(path.exists() for path in paths):
                began = time.perf_counter()
                videos = draw_batch(pipeline, drawn)
                took = (time.perf_counter() - began) / len(drawn)
                for path, one, video in zip(paths, drawn, videos, strict=True):
                    write_picture(path, _strip(video), {"prompt": one.prompt, "seconds": f"{took:.4f}"})
            for path in paths:
                with Image.open(path) as strip:
                    seconds.append(float(strip.info["seconds"]))
                    strips.append(strip.convert("RGB"))
                advance()
    return strips, median(seconds)


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    strip = Image.new("RGB", (sum(frame.width for frame in frames), frames[0].height))
    for i, frame in enumerate(frames):
        strip.paste(frame, (i * frame.width, 0))
    return strip


def _cut(strip: Image.Image) -> np.ndarray:
    """The square frames [frames, side, side, 3] of a strip."""
    pixels = np.asarray(strip)
    return np.stack(np.split(pixels, strip.width // strip.height, axis=1))


def _frames(video: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray((frame * 255).round().byte().permute(1, 2, 0).numpy()) for frame in video.unbind(1)]


def _images(video: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in video]


def _detect(recogniser: Recogniser, video: np.ndarray) -> list[list[Detection]]:
    return recognise(recogniser, torch.from_numpy(video).permute(0, 3, 1, 2))[0]


def _flicker(video: np.ndarray) -> float:
    """Mean distance of neighbouring frames."""
    return float(np.mean([np.abs(a.astype(float) - b).mean() for a, b in pairwise(video)]))


if __name__ == "__main__":
    typer.run(main)
