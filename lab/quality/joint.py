# pyright: basic, reportOperatorIssue=false, reportOptionalMemberAccess=false
"""A step cache alone, a method alone, and both: the fastest settings of each that stay within an error, in images.

python -m lab.quality.joint --size 512 --batch 8 --prompts 64

Every setting generates the captions of a search, in batches. For each PSNR to the dense images and each of the three
kinds, the fastest setting that reaches it on average then generates other captions, which the recogniser judges too.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from foveate import LLSA, HilbertA, Preset, StepCache, ToMA
from foveate.apps.console import progress
from foveate.apps.demo.evaluate import evaluate
from foveate.apps.demo.scenes import captions
from foveate.diffusers.preset import describe
from foveate.methods import Method
from foveate.pipelines.lora import using
from foveate.pipelines.request import Request, denoiser, draw_batch, load_pipeline
from foveate.tuning.similarity import psnr
from foveate.utils.device import versions
from foveate.utils.files import write_whole
from foveate.utils.progress import Track
from foveate.utils.timing import now
from foveate_models import find
from lab.quality.common import Batch, Commit, Pictures, Prompts, Size, save_result

DECIBELS = 25, 30, 35
STEPS, MARGIN = 20, 0.5  # dB above what is asked for, in the search
OTHER_CAPTIONS = 1000  # seed of the captions that the chosen settings are judged by
MERGING = [
    ToMA(keep=keep, start_percent=start) for keep, start in product((0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5), (0.0, 0.2))
]
SPARSE = [
    *(HilbertA(tiles=4, slide="diagonal", start_percent=start) for start in (0.4, 0.5, 0.6, 0.8)),
    *(HilbertA(tiles=16, slide="diagonal", start_percent=start) for start in (0.6, 0.8)),
    *(LLSA(top_k=16, start_percent=start) for start in (0.4, 0.6)),
]
CACHES = [
    StepCache(threshold=threshold, start_percent=0.2) for threshold in (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.6)
]
BESIDE = [*MERGING[:12], SPARSE[2]]  # methods that are tried together with each step cache


def main(
    size: Size = 512,
    search: Annotated[int, typer.Option(help="Captions of the search.")] = 16,
    prompts: Prompts = 64,
    batch: Batch = 8,
    device: str = "auto",
    dtype: str = "auto",
    pictures: Pictures = "out/joint",
    commit: Commit = "",
) -> None:
    """Search, judge and write the results."""
    pipe: Any = load_pipeline(str(find("pipeline")), device, dtype)
    request = Request("", (size, size), STEPS, None, 0)
    with progress() as track:
        tried = try_all(pipe, request, search, batch, Path(pictures) / f"{size}px-{search}.json", track)
        wanted = product(DECIBELS, ("cache", "method", "both"))
        chosen = {(least, kind): one for least, kind in wanted if (one := best(tried, kind, least))}
        presets = {one["preset"].title: one["preset"] for one in chosen.values()}
        scores = evaluate(
            pipe, [*presets.values()], Path(pictures) / f"{size}px",
            prompts=prompts, request=request._replace(seed=OTHER_CAPTIONS), batch=batch, track=track,
        )  # fmt: skip
    by_title = {score.label: score for score in scores}
    dense, rows = by_title["dense"], list[dict[str, Any]]()
    for (least, kind), one in chosen.items():
        score = by_title[one["preset"].title]
        rows.append(
            {
                "case": f"{kind}, {least} dB", "settings": score.label, "psnr": score.psnr.value,
                "objects": score.objects.value,
                "efficientnet": score.efficientnet and score.efficientnet.value,
                "seconds": score.seconds, "gain": dense.seconds / score.seconds,
                "computed": one["computed"],
            }
        )  # fmt: skip
        if (least, "cache") in chosen:
            rows[-1]["over_cache"] = by_title[chosen[least, "cache"]["preset"].title].seconds / score.seconds
    searched = [
        {"settings": one["preset"].title, **{name: x for name, x in one.items() if name != "preset"}} for one in tried
    ]
    result = {
        "settings": {"size": size, "steps": STEPS, "prompts": prompts, "batch": batch, "search": search},
        "dense": {"objects": dense.objects.value, "seconds": dense.seconds},
        "rows": rows, "searched": searched, "versions": versions(),
    }  # fmt: skip
    save_result(f"joint-{pipe.device.type}-{size}px", result, commit)
    Console().print(table_of(rows))


def try_all(pipe: Any, request: Request, search: int, batch: int, known: Path, track: Track) -> list[dict[str, Any]]:
    """What each setting gives on the captions of the search; what the file `known` tells is not tried again."""
    alone = [((), cache) for cache in CACHES] + [((method,), None) for method in (*MERGING, *SPARSE)]
    both = [((method,), cache) for method, cache in product(BESIDE, CACHES)]
    requests = [
        request._replace(prompt=prompt, seed=i) for i, prompt in enumerate(captions(search, 0, evaluation=True))
    ]
    batches = [requests[start : start + batch] for start in range(0, search, batch)]
    found: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    tried: list[dict[str, Any]] = []
    advance, dense = track("search", len(alone) + len(both)), list[Any]()
    for methods, cache in (*alone, *both):
        preset = preset_of(pipe, request, methods, cache)
        if preset.title not in found:
            dense = dense or generate(pipe, None, batches)[0]
            images, seconds, computed = generate(pipe, preset, batches)
            error = mean(psnr(*pair) for pair in zip(images, dense, strict=True))
            found[preset.title] = {"psnr": error, "seconds": seconds, "computed": computed}
            write_whole(known, json.dumps(found, indent=1).encode())
        kind = "both" if methods and cache else "method" if methods else "cache"
        tried.append({"preset": preset, "kind": kind, **found[preset.title]})
        advance()
    return tried


def preset_of(pipe: Any, request: Request, methods: tuple[Method, ...], cache: StepCache | None) -> Preset:
    """A preset with these methods and this step cache."""
    return Preset(methods=methods, cache=cache, models=[describe(denoiser(pipe))], size=request.size)


def generate(pipe: Any, preset: Preset | None, batches: Sequence[Sequence[Request]]) -> tuple[list[Any], float, float]:
    """The images, the seconds of the fastest batch, and the fraction of the steps that are computed."""
    images, seconds, skipped = list[Any](), list[float](), 0
    with using(pipe, preset) as run:
        for requests in batches:
            began = now(pipe.device)
            images += draw_batch(pipe, requests)
            seconds.append(now(pipe.device) - began)
        skipped = sum(run.summary().skipped.values()) if run else 0
    return images, min(seconds), 1 - skipped / STEPS / len(batches)


def best(tried: Sequence[dict[str, Any]], kind: str, least: float) -> dict[str, Any] | None:
    """The fastest setting of a kind with this PSNR, or None."""
    near = [one for one in tried if one["kind"] == kind and one["psnr"] >= least + MARGIN]
    return min(near, key=lambda one: one["seconds"], default=None)


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Table of the chosen settings."""
    table = Table("", "settings", "PSNR", "objects", "s per image", "gain", "computed", box=SIMPLE)
    for row in rows:
        numbers = (f"{row[name]:.3g}" for name in ("psnr", "objects", "seconds", "gain", "computed"))
        table.add_row(row["case"], row["settings"], *numbers)
    return table


if __name__ == "__main__":
    typer.run(main)
