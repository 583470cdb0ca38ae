"""`foveate compare`: one prompt with several methods, side by side."""

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import check_writable
from foveate.apps.cli.methods import read_methods
from foveate.apps.cli.pictures import (
    Fps,
    Frames,
    Guidance,
    Images,
    Lora,
    Methods,
    Model,
    Negative,
    Size,
    Steps,
    as_measured,
    note_steps,
    open_at_size,
    own_attention,
    remark_on,
    request_of,
    settings_of,
    suffix_of,
    with_distilled,
)
from foveate.apps.console import Device, Dtype, Seed, clear_errors, console, progress
from foveate.utils.processes import rank_name

__all__ = ["compare"]


@clear_errors
def compare(
    prompt: Annotated[str, typer.Argument(help="Prompt: a description of the image.")],
    model: Model = "",
    size: Size = None,
    method: Methods = None,
    lora: Lora = "",
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    image: Images = None,
    frames: Frames = None,
    fps: Fps = None,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Timed steps of each variant.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the page and its images. One with another comparison is refused. "
            "[dim]default: compare, or the first of compare-2, compare-3, ... that is free[/]"
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Compare methods with dense on one prompt: an HTML page with a verdict, images or videos, and times.

    The page grows with each image; after Ctrl-C the same command resumes. The built-in model is shown with the
    recommended settings: HilbertA with the built-in LoRA, ToMA, and LLSA with dense first steps. With --lora the page
    shows a method with the LoRA, merged into the weights, and without. Other models are shown with every method,
    active once the composition is settled: after a fifth of the steps, in videos after two fifths. A model of foveate
    train has its own log-linear attention.

    foveate compare "a red apple above a blue car"

    foveate compare "a lighthouse" --model black-forest-labs/FLUX.1-dev --method toma --method hilberta:tiles=16
    """
    if rank_name():
        raise ValueError("compare measures the time of one process: start it without torchrun or accelerate launch")
    asked = read_methods(method)
    by_default = not (model or lora or method)
    lora = "built-in" if by_default else lora
    check_writable(out or Path())
    size, steps = as_measured(asked, size, steps)
    pipe, distilled, size = open_at_size(model, lora, size, device, dtype)
    request = request_of(
        pipe, model, prompt, size, steps, guidance, seed, negative=negative, images=tuple(image or ()), frames=frames,
        fps=fps,
    )  # fmt: skip
    note_steps(asked, request.steps)
    suffix_of(pipe, request)  # fails without the packages to write videos
    from foveate.apps.demo.recogniser import judge_prompt
    from foveate.apps.demo.text import draws_scenes
    from foveate.apps.web.compare import PAGE, comparison, recommended, reserve, showcase
    from foveate.diffusers.card import card_of
    from foveate.pipelines.request import denoiser

    if by_default:
        methods = recommended(distilled)
    else:
        start = 0.0 if lora else card_of(denoiser(pipe)).start_percent  # LoRAs are distilled for all steps
        own = own_attention(pipe)
        methods = asked if method else own or showcase(start)
        methods = with_distilled(distilled, lora, methods)
    judge = judge_prompt(prompt) if draws_scenes(pipe) else None
    with progress() as track:
        settings = settings_of(pipe, model, request) | ({"LoRA": lora} if lora else {})
        notice = remark_on(pipe, model, prompt)
        out = out or _unused(lambda folder: reserve(folder, pipe, request, settings))
        comparison(
            pipe, request, methods, out, settings=settings, notice=notice, judge=judge, rounds=rounds, track=track
        )
    console.print("open the page in a browser:")
    print((out / PAGE).resolve())


def _unused(reserve: Callable[[Path], None]) -> Path:
    """First of the folders "compare", "compare-2", ... that can be reserved."""
    for folder in chain([Path("compare")], (Path(f"compare-{i}") for i in count(2))):
        try:
            reserve(folder)
        except ValueError:
            continue
        return folder
    raise AssertionError("there is always another number")
