# pyright: basic
"""Sparsity over steps against one setting, and resolution over steps against token merging.

python -m lab.quality.over_steps --size 512 --batch 8 --search 8 --prompts 32
python -m lab.quality.over_steps --model built-in-video --size 96 --batch 8 --search 8 --prompts 16

Every setting generates the captions of a search, in batches. Of each kind, the fastest setting that reaches a PSNR to
the dense images on average, and the fastest one that shows as many of the requested objects, then generate other
captions. So do settings of token merging, and the setting of resolution over steps that takes about as long. An
interrupted run resumes with the first setting that was not measured.

On a GPU seconds are those of the fastest batch. On a CPU, which others may use too, they are of processor time.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from foveate import LLSA, HilbertA, ToMA
from foveate.apps.console import progress
from foveate.apps.demo import MODELS
from foveate.apps.demo.recogniser import judge, load_recogniser, recognise
from foveate.apps.demo.scenes import scenes
from foveate.methods import ComposedMethod, Method, ProgressiveResolution
from foveate.pipelines.lora import using
from foveate.pipelines.request import Request, denoiser, draw_batch, fingerprint, load_pipeline, makes_video
from foveate.tuning.similarity import psnr
from foveate.utils.device import versions
from foveate.utils.files import claim, write_whole
from foveate.utils.progress import Track
from foveate.utils.timing import now
from lab.quality.common import Batch, Commit, Pictures, Prompts, Size, save_result
from lab.quality.video import judge_video
from lab.training.moving import moving_scenes

STEPS = 20
DECIBELS, MARGIN = 30, 0.5  # dB above what is asked for, in the search
FEWER_OBJECTS = 0.005  # fraction of the objects that "as many" may miss
OTHER_CAPTIONS = 1000  # seed of the captions that the chosen settings are judged by


class Setting(NamedTuple):
    """A setting to measure: a method, resolution over steps, both, or neither (dense)."""

    kind: str
    method: Method | ComposedMethod | None = None
    resolution: ProgressiveResolution | None = None

    @property
    def title(self) -> str:
        """Titles of both."""
        return " + ".join(part.title for part in (self.method, self.resolution) if part) or "dense"


def candidates() -> list[Setting]:
    """The settings of the search."""
    starts = (0.3, 0.6), (0.4, 0.6), (0.4, 0.8), (0.5, 0.7), (0.5, 0.8), (0.6, 0.8)
    tiles = [((0.0, "dense"), (start, 4), (change, 16)) for start, change in starts]
    nodes = [((0.0, "dense"), (start, 16), (change, 8)) for start, change in ((0.2, 0.5), (0.3, 0.6), (0.4, 0.7))]
    kept = [((0.0, first), (change, then)) for first, then, change in
            (("dense", 0.5, 0.4), (0.85, 0.5, 0.3), (0.85, 0.5, 0.5), (0.75, 0.5, 0.5))]  # fmt: skip
    merging = [ToMA(keep=keep, start_percent=start) for keep, start in product((0.85, 0.75, 0.6, 0.5), (0.0, 0.2))]
    resolutions = [ProgressiveResolution(factor=factor, until=until)
                   for factor, until in product((2, 1.5), (0.1, 0.2, 0.3, 0.4, 0.5))]  # fmt: skip
    early, sparse = (HilbertA(tiles=4, start_percent=start) for start in (0.2, 0.4))  # of the second part
    return [
        *(Setting("one", HilbertA(tiles=4, start_percent=start)) for start in (0.4, 0.5, 0.6, 0.8)),
        *(Setting("one", HilbertA(tiles=16, start_percent=start)) for start in (0.4, 0.6, 0.8)),
        *(Setting("one", LLSA(top_k=16, start_percent=start)) for start in (0.2, 0.4, 0.6)),
        *(Setting("one", method) for method in merging),
        *(Setting("schedule", HilbertA(tiles=schedule)) for schedule in tiles),
        *(Setting("schedule", LLSA(top_k=schedule)) for schedule in nodes),
        *(Setting("schedule", ToMA(keep=schedule)) for schedule in kept),
        *(Setting("resolution", None, resolution) for resolution in resolutions),
        *(Setting("resolution with HilbertA", *pair) for pair in product((early, sparse), resolutions[:4])),
        *(Setting("ToMA with HilbertA", ComposedMethod((sparse, method))) for method in merging[::2]),
    ]


def main(
    model: Annotated[str, typer.Option(help="built-in-video, or empty: the image model.")] = "",
    size: Size = 512,
    frames: Annotated[int, typer.Option(help="Frames of a video.")] = 17,
    search: Annotated[int, typer.Option(help="Captions of the search.")] = 8,
    prompts: Prompts = 32,
    batch: Batch = 8,
    only: Annotated[list[str] | None, typer.Option(help="Part of the titles to try; all by default.")] = None,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "out/over-steps",
    commit: Commit = "",
) -> None:
    """Search, judge and write the results."""
    pipe: Any = load_pipeline(str(MODELS[model].folder), device, dtype)
    video = makes_video(pipe)
    request = Request("", (size, size), STEPS, 3.0 if video else None, 0, frames=frames if video else None)
    folder = Path(pictures) / f"{model or 'built-in'}-{pipe.device.type}-{size}px"
    asked = {"weights": fingerprint(denoiser(pipe)), "search": search, "prompts": prompts, "batch": batch}
    claim(folder, {name: str(value) for name, value in asked.items()})
    wanted = [one for one in candidates() if not only or any(name in one.title for name in only)]
    with progress() as track:
        tried = measured(pipe, request, wanted, search, batch, folder / "search.json", track)
        chosen = choose(wanted, tried)
        settings = list(dict.fromkeys(chosen.values()))
        other = request._replace(seed=OTHER_CAPTIONS)
        scores = measured(pipe, other, settings, prompts, batch, folder / "judged.json", track)
    rows = [
        {"case": case, "settings": one.title, "gain": scores["dense"]["seconds"] / scores[one.title]["seconds"],
         **scores[one.title]}
        for case, one in {"dense": Setting("dense"), **chosen}.items()
    ]  # fmt: skip
    result = {
        "settings": {"model": model or "built-in", "size": size, "steps": STEPS, **asked},
        "rows": rows,
        "searched": [{"settings": title, **one} for title, one in tried.items()],
        "versions": versions(),
    }
    name = f"over-steps-{'video-' if video else ''}{pipe.device.type}-{size}px"
    save_result(name, result, commit)
    Console().print(table_of(rows))


def measured(
    pipe: Any,
    request: Request,
    settings: Sequence[Setting],
    count: int,
    batch: int,
    known: Path,
    track: Track,
) -> dict[str, dict[str, Any]]:
    """PSNR, objects and seconds of dense and of each setting; results in the file `known` are reused."""
    video = makes_video(pipe)
    source = moving_scenes if video else scenes
    wanted: list[Any] = list(islice(source(request.seed, evaluation=True), count))
    captions = [one.scene.caption if video else one.caption for one in wanted]
    requests = [request._replace(prompt=text, seed=request.seed + i) for i, text in enumerate(captions)]
    batches = [requests[start : start + batch] for start in range(0, count, batch)]
    found: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    advance, dense = track(known.stem, len(settings) + 1), list[Any]()
    recogniser = load_recogniser(device=pipe.device)
    for one in (Setting("dense"), *settings):
        if one.title not in found or (not dense and any(each.title not in found for each in settings)):
            made, seconds, told = generate(pipe, one, batches)
            dense = dense or made
            error = None if made is dense else mean(_psnr(*pair) for pair in zip(made, dense, strict=True))
            shown = _objects(recogniser, made, wanted, video)
            found[one.title] = {"psnr": error, "objects": shown, "seconds": seconds, "why": told}
            write_whole(known, json.dumps(found, indent=1).encode())
        advance()
    return {title: found[title] for title in ("dense", *(one.title for one in settings))}


def generate(pipe: Any, setting: Setting, batches: Sequence[Sequence[Request]]) -> tuple[list[Any], float, str]:
    """Images as lists of frames, seconds of one in the fastest batch, and why passes were dense."""
    made, seconds, told = list[Any](), list[float](), ""
    call = partial(setting.resolution, pipe) if setting.resolution else None
    clock: Callable[[], float] = time.process_time if pipe.device.type == "cpu" else lambda: now(pipe.device)
    with using(pipe, setting.method) as run:
        if pipe.device.type != "cpu":
            draw_batch(pipe, [one._replace(steps=2) for one in batches[0]], call=call)  # the first call is slower
        for requests in batches:
            began = clock()
            drawn = draw_batch(pipe, requests, call=call)
            seconds.append((clock() - began) / len(requests))
            made += [list(one) if isinstance(one, list | tuple) else [one] for one in drawn]
        if run:
            told = "; ".join(
                f"{n} dense: {why}" for why, n in next(iter(run.summary().outcomes.values())).items() if why
            )
    return made, min(seconds), told


def choose(settings: Sequence[Setting], tried: dict[str, dict[str, Any]]) -> dict[str, Setting]:
    """Settings to compare, by the reason for which each was chosen."""

    def fastest(kind: str, enough: Callable[[dict[str, Any]], bool]) -> Setting | None:
        near = [one for one in settings if one.kind == kind and enough(tried[one.title])]
        return min(near, key=lambda one: tried[one.title]["seconds"], default=None)

    def as_long(kind: str, as_: Setting) -> Setting | None:
        """The setting of a kind that is nearest in time, by ratio."""
        asked = tried[as_.title]["seconds"]
        near = [one for one in settings if one.kind == kind]
        return min(near, key=lambda one: abs(np.log(tried[one.title]["seconds"] / asked)), default=None)

    chosen: dict[str, Setting | None] = {}
    least = tried["dense"]["objects"] - FEWER_OBJECTS
    for kind in ("one", "schedule", "resolution", "resolution with HilbertA"):
        chosen[f"{kind}, {DECIBELS} dB"] = fastest(kind, lambda score: score["psnr"] >= DECIBELS + MARGIN)
        chosen[f"{kind}, equal objects"] = fastest(kind, lambda score: score["objects"] >= least)
    for one in settings:
        merges = [part.title for part in (one.method.parts if one.method else ()) if isinstance(part, ToMA)]
        if merges and merges[0] in ("ToMA keep=0.75", "ToMA keep=0.5") and one.kind != "schedule":
            beside = " with HilbertA" if one.kind == "ToMA with HilbertA" else ""
            chosen[f"{merges[0]}{beside}"] = one
            chosen[f"resolution{beside}, as long as {merges[0]}"] = as_long(f"resolution{beside}", one)
    return {case: one for case, one in chosen.items() if one}


def _psnr(made: Sequence[Any], dense: Sequence[Any]) -> float:
    return mean(min(psnr(*pair), 99.0) for pair in zip(made, dense, strict=True))


def _objects(recogniser: Any, made: Sequence[Sequence[Any]], wanted: Sequence[Any], video: bool) -> float:
    """Fraction of the requested objects that the recogniser finds."""
    found = total = 0
    for frames, scene in zip(made, wanted, strict=True):
        pixels = torch.stack([torch.from_numpy(np.array(frame)) for frame in frames]).permute(0, 3, 1, 2)
        detections = recognise(recogniser, pixels)[0]
        verdict: Any = judge_video(detections, scene) if video else judge(detections[0], scene)
        found += verdict.found if video else verdict.objects_found
        total += verdict.objects
    return found / total


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Table of the chosen settings."""
    table = Table("", "settings", "PSNR", "objects", "s each", "gain", box=SIMPLE)
    for row in rows:
        numbers = ("" if row[name] is None else f"{row[name]:.3g}" for name in ("psnr", "objects", "seconds", "gain"))
        table.add_row(row["case"], row["settings"], *numbers)
    return table


if __name__ == "__main__":
    typer.run(main)
