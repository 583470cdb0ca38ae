"""Train the same pixel model with dense and with sparse attention, and judge it at equal steps and at equal time.

python evals/pixel_dit.py --size 64 --out pixels-64 --compile              # on one GPU
python evals/pixel_dit.py --size 128 --batch 16 --out pixels-128 --compile

Every variant sees the same scenes under the same noise, from the same first weights: first small pictures, then those
of --size, whose steps and seconds count. At equal time a variant has had as many steps as fit into the time of the
dense one, by the median of their seconds. Judged are pictures of held-out captions. What is found in --out is gone on
with.
"""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import typer
from diffusers import FlowMatchEulerDiscreteScheduler
from quality import RESULTS, Batch, Commit, Prompts

from foveate.cli.common import progress
from foveate.cli.train import built_in_reader
from foveate.compare import versions
from foveate.demo.pictures import ScenePictures
from foveate.evaluate import Score, evaluate
from foveate.files import write_whole
from foveate.integrations.diffusers.pipelines import Request, load
from foveate.integrations.diffusers.pixel_dit import MODELS, PixelDiT
from foveate.integrations.diffusers.pixel_pipeline import PixelPipeline
from foveate.training.pixel import PixelRecipe, Stage, train

SMALL = 32  # px of the first stage
PROBE = 50  # steps of --size, whose median time tells how many fit into that of dense
BIN = 100  # steps of a point of the curve
SEED = 0

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "top-k": {"levels": 1, "enrich": False},
    "llsa-bare": {"enrich": False},
    "llsa": {},
}
"""By name what of the model is not as in the others."""


def main(
    size: Annotated[int, typer.Option(help="Side of the pictures in pixels.")] = 64,
    steps: Annotated[int, typer.Option(help="With pictures of that size.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Pictures a step.")] = 64,
    before: Annotated[int, typer.Option(help=f"Steps with {SMALL} px that come first.")] = 5000,
    at_once: Annotated[int, typer.Option(help="Pictures that the GPU sees together at most.")] = 64,
    dit: Annotated[str, typer.Option(help="Depth and width.")] = "DiT-S",
    patch: Annotated[int, typer.Option(help="Pixels along each side of a token.")] = 1,
    rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4,
    average: Annotated[float, typer.Option(help="What the average of the weights keeps at each step.")] = 0.9999,
    prompts: Prompts = 500,
    drawn: Batch = 32,
    only: Annotated[str, typer.Option(help="Variants, separated by commas, dense first.")] = ",".join(VARIANTS),
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs and pictures.")] = Path("eval-pixels"),
    commit: Commit = "",
) -> None:
    """Train and judge one variant after another."""
    gpu = torch.cuda.is_available()
    recipe = PixelRecipe(rate=rate, average=average, dtype="bfloat16" if gpu else "float32", seed=SEED)
    first, dense_seconds, results = Stage((SMALL, SMALL), before, 64), 0.0, {}
    with progress() as track:
        for name in only.split(","):

            def go_on(steps: int, name: str = name) -> float:
                """Train until there were so many steps of that size; the median seconds of one."""
                torch.compiler.reset()  # a process keeps few graphs, and every variant has its own
                train(
                    out / name,
                    untrained(name, dit, patch).to("cuda" if gpu else "cpu"),
                    ScenePictures(SEED),
                    [first, Stage((size, size), steps, batch)],
                    recipe,
                    at_once=at_once,
                    compile=compiled,
                    track=track,
                )
                return median(seconds for _, seconds in log(out / name)[before:])

            def judged(name: str = name) -> Score:
                folder = out / name / f"judged-{len(log(out / name))}"
                request = Request("", (size, size), 20, None, SEED)
                pipe = load(str(out / name))
                return evaluate(pipe, [], folder, prompts=prompts, request=request, batch=drawn, track=track)[1]

            seconds = go_on(min(PROBE, steps))
            dense_seconds = seconds if name == "dense" else dense_seconds
            in_time = max(min(PROBE, steps), equal_time(steps, dense_seconds, seconds))
            at = {"equal steps": steps, "equal time": in_time}
            scores: dict[str, Any] = {}
            for label, count in sorted(at.items(), key=lambda item: item[1]):
                go_on(count)
                scores[label] = {"steps": count, **judged()._asdict()}
            results[name] = {**scores, "seconds a step": seconds, "curve": curve(log(out / name)[before:])}
    about = {"size": size, "dit": dit, "patch": patch, "batch": batch, "steps": steps, "steps before": before}
    content = {**about, "recipe": asdict(recipe), "prompts": prompts, "versions": versions(), "variants": results}
    if commit:
        content["versions"]["commit"] = commit
    path = RESULTS / f"pixel-dit-{'cuda' if gpu else 'cpu'}-{size}px.json"
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n")
    print(path)


def untrained(name: str, dit: str, patch: int) -> PixelPipeline:
    """The pipeline of a variant, with the first weights that all of them have.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
    text_encoder, tokenizer = built_in_reader()
    torch.manual_seed(SEED)
    model = PixelDiT(**MODELS[dit], patch_size=patch, text_dim=text_encoder.config.d_model, **VARIANTS[name])
    return PixelPipeline(model, FlowMatchEulerDiscreteScheduler(), tokenizer, text_encoder)


def equal_time(steps: int, dense_seconds: float, seconds: float) -> int:
    """How many steps of `seconds` fit into so many of `dense_seconds`; as many where dense was not timed."""
    return max(1, round(steps * dense_seconds / seconds)) if dense_seconds else steps


def log(folder: Path) -> list[tuple[float, float]]:
    """Loss and seconds of every step."""
    rows = csv.reader((folder / "log.csv").read_text().splitlines())
    return [(float(loss), float(seconds)) for _, loss, seconds in rows]


def curve(steps: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Mean losses of runs of steps, and how long they had taken by then at the median speed."""
    usual = median(seconds for _, seconds in steps)
    parts = [steps[start : start + BIN] for start in range(0, len(steps), BIN)]
    ends = [start + len(part) for start, part in zip(range(0, len(steps), BIN), parts, strict=True)]
    return [
        {"step": end, "seconds": round(end * usual, 2), "loss": mean(loss for loss, _ in part)}
        for end, part in zip(ends, parts, strict=True)
    ]


if __name__ == "__main__":
    typer.run(main)
