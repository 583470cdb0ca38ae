"""Train a pixel model with dense and with sparse attention, and score both at equal steps and at equal time.

python -m lab.quality.pixel_dit --size 64 --out pixels-64 --compile              # on one GPU
python -m lab.quality.pixel_dit --size 128 --batch 16 --out pixels-128 --compile

Every variant has the same initial weights, scenes and noise: first small images, then images of --size, whose steps
and seconds count. At equal time a variant has had as many steps as fit into the time of the dense variant, by median
step times. Images of held-out captions are scored. An existing run in --out is resumed.
"""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from foveate.apps.console import progress
from foveate.apps.demo.evaluate import evaluate
from foveate.apps.demo.scenes import ScenePictures
from foveate.apps.demo.text import built_in_text_encoder
from foveate.nn.pixel_dit import MODELS, PixelDiT
from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import Request, load_pipeline
from foveate.training.pixel import PixelRecipe, Stage, train
from foveate.training.run import RunOptions
from foveate.utils.device import versions
from lab.quality.common import Batch, Commit, Prompts, device_type, save_result

SMALL = 32  # pixels of the first stage
PROBE = 50  # steps of --size that give the median step time
BIN = 100  # steps averaged into a point of the loss curve
WINDOW = 256  # tokens of a window: about as many as log-linear attention reads
SEED = 0

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "windows": {"attention": "dense"},  # see `with_own_attention`
    "top-k": {"levels": 1, "enrich": False},
    "llsa": {},
}
"""Options of the model, by variant."""


def attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, *, extra_k: Tensor, extra_v: Tensor, **nothing: None
) -> tuple[Tensor, None, None]:
    """Attention of every token over its window and the text; see `foveate.nn.pixel_dit.attend_densely`.

    A window is a run of `WINDOW` tokens of the model's order: in Morton order, a square of 16 x 16.
    """
    batch, heads, tokens, dim = q.shape
    count = max(1, tokens // WINDOW)

    def windows(x: Tensor) -> Tensor:
        """[batch and windows, heads, tokens, dim]."""
        return x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)

    text = [x.repeat_interleave(count, 0) for x in (extra_k, extra_v)]
    k, v = (torch.cat([windows(x), extra], 2) for x, extra in zip((k, v), text, strict=True))
    out = F.scaled_dot_product_attention(windows(q), k, v)
    return out.unflatten(0, (batch, count)).transpose(1, 2).reshape(batch, heads, tokens, dim), None, None


def with_own_attention(pipeline: PixelPipeline, name: str) -> PixelPipeline:
    """The pipeline with the attention of its variant, since the model's config does not cover windows."""
    if name == "windows":
        for block in pipeline.transformer.blocks:
            block.attn.processor.own = attend_in_windows
    return pipeline


@dataclass(frozen=True)
class Trial:
    """A variant with its settings of training and scoring.

    Attributes:
        name: Name in `VARIANTS`.
        folder: Folder of the run.
        dit: Name in `MODELS`.
        patch: Pixels along each side of a token.
        stages: Stage of small images, and the stage whose steps count.
        recipe: Hyperparameters.
        at_once: Largest batch on the GPU.
        compiled: Compile the blocks.
        prompts: Number of held-out captions.
        drawn: Batch size of generation.
        track: Shows progress.
    """

    name: str
    folder: Path
    dit: str
    patch: int
    stages: tuple[Stage, Stage]
    recipe: PixelRecipe
    at_once: int
    compiled: bool
    prompts: int
    drawn: int
    track: Any

    def log(self) -> list[tuple[float, float]]:
        """Loss and seconds of every step that counts."""
        path = self.folder / "log.csv"
        rows = csv.reader(path.read_text().splitlines()) if path.exists() else []
        return [(float(loss), float(seconds)) for _, loss, seconds in rows][self.stages[0].steps :]

    def seconds(self) -> float:
        """Median seconds of the first steps that count."""
        return median(seconds for _, seconds in self.log()[:PROBE])

    def train(self, steps: int) -> None:
        """Train up to this number of steps that count."""
        if len(self.log()) >= steps:
            return
        first, last = self.stages
        train(
            self.folder,
            untrained(self.name, self.dit, self.patch).to(device_type()),
            ScenePictures(SEED),
            [first, last._replace(steps=steps)],
            self.recipe,
            RunOptions(at_once=self.at_once, compile=self.compiled, track=self.track),
        )

    def judged(self, steps: int) -> dict[str, Any]:
        """Scores after this number of steps that count."""
        out = self.folder / f"judged-{steps}"
        if not (out / "scores.json").exists():
            self.train(steps)
            request = Request("", self.stages[1].size, 20, None, SEED)
            loaded: Any = load_pipeline(str(self.folder))
            pipe = with_own_attention(loaded, self.name)
            evaluate(pipe, [], out, prompts=self.prompts, request=request, batch=self.drawn, track=self.track)
        _real, score = json.loads((out / "scores.json").read_text())["scores"]
        return {"steps": steps, **score}


def main(
    size: Annotated[int, typer.Option(help="Side of the images in pixels.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps with images of this size.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 64,
    before: Annotated[int, typer.Option(help=f"Steps with {SMALL} px before.")] = 5000,
    at_once: Annotated[int, typer.Option(help="Largest batch on the GPU.")] = 64,
    dit: Annotated[str, typer.Option(help="Depth and width.")] = "DiT-S",
    patch: Annotated[int, typer.Option(help="Pixels along each side of a token.")] = 1,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    average: Annotated[float, typer.Option(help="Decay of the average of the weights.")] = 0.9999,
    prompts: Prompts = 500,
    drawn: Batch = 32,
    only: Annotated[str, typer.Option(help="Variants, separated by commas, dense first.")] = ",".join(VARIANTS),
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs and images.")] = Path("eval-pixels"),
    commit: Commit = "",
) -> None:
    """Train and score one variant after the other."""
    device = device_type()
    dtype = "bfloat16" if device == "cuda" else "float32"
    recipe = PixelRecipe(rate=rate, optimizer=optimizer, average=average, dtype=dtype, seed=SEED)
    stages = Stage((SMALL, SMALL), before, 64), Stage((size, size), steps, batch)
    results, dense_seconds, probe = {}, 0.0, min(PROBE, steps)
    with progress() as track:
        for name in only.split(","):
            torch.compiler.reset()  # each variant compiles new graphs, and their number is limited
            trial = Trial(name, out / name, dit, patch, stages, recipe, at_once, compiled, prompts, drawn, track)
            trial.train(probe)
            seconds = trial.seconds()
            dense_seconds = seconds if name == "dense" else dense_seconds
            at = {"equal steps": steps, "equal time": max(probe, equal_time(steps, dense_seconds, seconds))}
            judged = {label: trial.judged(count) for label, count in sorted(at.items(), key=lambda item: item[1])}
            results[name] = {**judged, "seconds a step": trial.seconds(), "curve": curve(trial.log())}
            content: dict[str, Any] = {
                **{"size": size, "dit": dit, "patch": patch, "batch": batch, "steps": steps, "steps before": before},
                **{"recipe": asdict(recipe), "prompts": prompts, "versions": versions(), "variants": results},
            }
            print(save_result(f"pixel-dit-{device}-{size}px", content, commit))  # each variant takes minutes


def untrained(name: str, dit: str, patch: int) -> PixelPipeline:
    """Pipeline of a variant with its initial weights.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
    text_encoder, tokenizer = built_in_text_encoder()
    torch.manual_seed(SEED)
    model = PixelDiT(**MODELS[dit], patch_size=patch, text_dim=text_encoder.config.d_model, **VARIANTS[name])
    pipeline = PixelPipeline(model, FlowMatchEulerDiscreteScheduler(), tokenizer, text_encoder)
    return with_own_attention(pipeline, name)


def equal_time(steps: int, dense_seconds: float, seconds: float) -> int:
    """Number of steps of `seconds` in the time of `steps` dense steps; `steps` if dense was not timed."""
    return max(1, round(steps * dense_seconds / seconds)) if dense_seconds else steps


def curve(steps: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Loss curve: mean losses over `BIN` steps, with the seconds so far at the median step time."""
    usual = median(seconds for _, seconds in steps)
    parts = [steps[start : start + BIN] for start in range(0, len(steps), BIN)]
    ends = [start + len(part) for start, part in zip(range(0, len(steps), BIN), parts, strict=True)]
    return [
        {"step": end, "seconds": round(end * usual, 2), "loss": mean(loss for loss, _ in part)}
        for end, part in zip(ends, parts, strict=True)
    ]


if __name__ == "__main__":
    typer.run(main)
