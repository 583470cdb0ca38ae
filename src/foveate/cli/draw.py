"""Commands that draw: one picture, one prompt side by side, many prompts judged."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foveate.cli.common import (
    Device,
    Dtype,
    Guidance,
    Model,
    Seed,
    Size,
    Steps,
    clear_errors,
    console,
    open_model,
    progress,
    remark_on,
    request_of,
    settings_of,
)
from foveate.methods import METHODS, Method, method_from_text

__all__ = ["compare", "evaluate", "generate"]


@clear_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Model = "",
    size: Size = None,
    method: Annotated[str, typer.Option(help=f"dense, {', '.join(METHODS)}.")] = "dense",
    tiles: Annotated[str | None, typer.Option(help="Tiles of the method: a number, or auto.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Any option of the method: -o centre=0 -o period=2.")
    ] = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="PNG to write. [dim]default: named after the prompt[/]")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one picture. The PNG carries its settings.

    foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048 --method hilberta --tiles 16
    """
    chosen = _method(method, tiles, option or [])
    if out and (out.suffix.lower() != ".png" or out.is_dir()):
        raise ValueError(f"--out names the PNG file to write, not {out}: end it with .png")
    pipe = open_model(model, device, dtype)
    request = request_of(pipe, model, prompt, size, steps, guidance, seed)
    from foveate.files import slug, write_picture
    from foveate.integrations.diffusers.apply import apply
    from foveate.integrations.diffusers.pipelines import draw

    path = out or Path(f"{slug(prompt)}-{seed}.png")
    if not model and (remark := remark_on(prompt)):
        console.print(remark)
    with progress() as track:
        advance, began = track(chosen.title if chosen else "dense", request.steps), time.perf_counter()
        with apply(pipe, chosen) if chosen else nullcontext() as run:
            image = draw(pipe, request, advance)
            summary = run.summary() if run else None
        about = {"method": repr(chosen) if chosen else "dense", "seconds": f"{time.perf_counter() - began:.1f}"}
        write_picture(path, image, {**settings_of(pipe, model, request), **about})
    if summary is not None:
        print(summary)
    console.print(f"drawn in {about['seconds']} s")
    print(path)


@clear_errors
def compare(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Model = "",
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often each variant's step is timed.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the page and its pictures.")] = Path("compare"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one prompt dense and with every method: pictures, times and patterns on one HTML page.

    foveate compare "a red apple above a blue car"
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out names a folder for the page, but {out} is a file: name another")
    pipe = open_model(model, device, dtype)
    request = request_of(pipe, model, prompt, size, steps, guidance, seed)
    from foveate import compare as side_by_side

    with progress() as track:
        page = side_by_side.compare(
            pipe,
            request,
            side_by_side.showcase(),
            out,
            settings=settings_of(pipe, model, request),
            notice="" if model else remark_on(prompt),
            rounds=rounds,
            track=track,
        )
    console.print("open the page in a browser:")
    print(page.resolve())


@clear_errors
def evaluate(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="hilberta, or with options hilberta:tiles=16,centre=0. Repeat it for more. [dim]default: "
            "the settings that compare shows[/]"
        ),
    ] = None,
    model: Model = "",
    prompts: Annotated[int, typer.Option(min=2, max=100_000, help="Held-out captions to draw.")] = 100,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Pictures drawn together.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder of pictures and scores; a run found there is gone on with.")
    ] = Path("eval"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Judge methods by many pictures: are the requested objects there, do they stand as asked, how near to dense.

    The captions are ones that the built-in model was never trained on. A recogniser, trained on real renderings, looks
    at every picture. Numbers come with 95 % intervals. Ctrl-C loses nothing: run the same command again.

    foveate eval --method hilberta:tiles=4 --method hilberta:tiles=16 --prompts 100 --seed 0
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out names a folder for the results, but {out} is a file: name another")
    methods = [_spelled(text) for text in method or []]
    pipe = open_model(model, device, dtype)
    request = request_of(pipe, model, "", size, steps, guidance, seed)
    from foveate.compare import showcase
    from foveate.evaluate import evaluate, score_table

    with progress() as track:
        scores = evaluate(pipe, methods or showcase(), out, prompts=prompts, request=request, batch=batch, track=track)
    Console().print(score_table(scores))
    for name in ("scores.json", "sheet.png"):
        print(out / name)


def _spelled(text: str) -> Method:
    """The method of "hilberta:tiles=16,centre=0"."""
    name, _, options = text.partition(":")
    return method_from_text(name, _pairs(options.split(",") if options else []))


def _pairs(options: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (option.partition("=") for option in options)}


def _method(name: str, tiles: str | None, options: list[str]) -> Method | None:
    pairs = _pairs(options)
    if tiles is not None:
        pairs["tiles"] = tiles
    if name != "dense":
        return method_from_text(name, pairs)
    if pairs:
        raise ValueError(f"dense takes no options ({', '.join(pairs)}): name a method, --method {next(iter(METHODS))}")
    return None
