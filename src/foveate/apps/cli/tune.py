"""`foveate tune`: the fastest setting for a model, a size and this machine."""

from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import check_writable, read_prompts
from foveate.apps.cli.methods import read_methods
from foveate.apps.cli.pictures import Model, Size, Steps, open_at_size, request_of
from foveate.apps.console import Device, Dtype, Seed, clear_errors, console, progress

__all__ = ["tune"]

PROMPTS = (
    "a lighthouse on a cliff at dusk, waves below",
    "portrait of an old fisherman with a grey beard, soft window light",
    "a red bicycle leaning against a yellow wall",
    "a bowl of ramen with egg and scallions, seen from above",
    "a market street in the rain, neon signs reflected on the ground",
    "a watercolor of a fox in a birch forest",
)
"""Default prompts for models other than the built-in one."""


@clear_errors
def tune(
    model: Model = "",
    min_ssim: Annotated[
        float | None,
        typer.Option(min=-1, max=1, help="Least SSIM to the dense image. [dim]default: 0.9[/]"),
    ] = None,
    min_psnr: Annotated[
        float | None, typer.Option(min=0, help="Least PSNR to the dense image in dB, in place of SSIM.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with a prompt a line. The first third is for calibration, the others check the result. "
            "[dim]default: 6 prompts; for the built-in model captions it was never trained on[/]"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to try: toma:keep=0.5; combined, hilberta:tiles=16+toma. Repeat the option for more. "
            "[dim]default: ToMA with 0.75 and 0.5, HilbertA with 4 and 16 tiles, LLSA, HilbertA with ToMA[/]"
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Try step caches too, alone and with every method."),
    ] = True,
    size: Size = None,
    steps: Steps = None,
    guidance: Annotated[
        float | None, typer.Option(min=0, max=1000, help="Guidance scale. [dim]default: the pipeline's[/]")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Frames of a video. [dim]default: the pipeline's[/]")
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder for presets, images and measurements; an existing run is resumed."),
    ] = Path("tuned"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Choose the fastest setting whose images stay near the dense ones, and write it as a preset.

    Every method is measured on this machine, for this model and size: its error and its time, step by step and layer
    by layer. A step cache skips steps that change little. Whole images of held-out prompts then decide how many steps
    and layers stay dense, and how many steps are skipped. After Ctrl-C the same command resumes, and another budget
    reuses the measurements.

    foveate tune --min-ssim 0.9 --size 256

    foveate tune --model black-forest-labs/FLUX.1-dev --size 1024 --min-ssim 0.95 --prompts prompts.txt

    foveate generate "an owl" --size 256 --method tuned/ssim-0.9.json
    """
    from foveate.tuning.tune import CACHES, CANDIDATES, Budget, check
    from foveate.tuning.tune import tune as search

    if min_ssim is not None and min_psnr is not None:
        raise ValueError("--min-ssim and --min-psnr are two budgets: give one of them")
    budget = Budget(min_psnr, "psnr") if min_psnr is not None else Budget(0.9 if min_ssim is None else min_ssim)
    methods, caches = read_methods(method) or CANDIDATES, CACHES if cache else ()
    texts = _prompts(prompts, model, seed)
    check(texts, methods, caches)
    check_writable(out)
    pipe, _, _ = open_at_size(model, "", size, device, dtype)
    request = request_of(pipe, model, texts[0], size, steps, guidance, seed, frames=frames)
    with progress() as track:
        preset = search(
            pipe, texts, budget, size=request.size, steps=request.steps, guidance=guidance, frames=request.frames,
            seed=seed, methods=methods, caches=caches, out=out, track=track,
            say=lambda line: console.print(line, soft_wrap=True),
        )  # fmt: skip
    path = out / f"{budget.name.lower()}-{budget.at_least:g}.json"
    preset.save(path)
    gain = preset.evidence["speed_up"]
    console.print(f"{preset.title}: the steps of an image are {gain:.2f}x faster", soft_wrap=True)
    print(path)


def _prompts(path: Path | None, model: str, seed: int) -> list[str]:
    """Prompts of a file, or the default prompts of the model."""
    if path is not None:
        return read_prompts(path)
    if model:
        return list(PROMPTS)
    from foveate.apps.demo.scenes import captions

    return captions(len(PROMPTS), seed, evaluation=True)
