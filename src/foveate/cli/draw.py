"""Commands that draw: one picture, one prompt side by side, many prompts judged."""

from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.common import Device, Dtype, Guidance, Model, Seed, Size, Steps, clear_errors, console, prepare, progress
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
    pipe, request, settings = prepare(prompt, model, size, steps, guidance, seed, device, dtype)
    from foveate.files import slug, write_picture
    from foveate.integrations.diffusers.apply import apply
    from foveate.integrations.diffusers.pipelines import draw

    path = out or Path(f"{slug(prompt)}-{seed}.png")
    with progress() as track:
        advance = track(chosen.title if chosen else "dense", request.steps)
        if chosen is None:
            image, summary = draw(pipe, request, advance), None
        else:
            with apply(pipe, chosen) as run:
                image, summary = draw(pipe, request, advance), run.summary()
        write_picture(path, image, {**settings, "method": repr(chosen) if chosen else "dense"})
    if summary is not None:
        print(summary)
    if not model:
        console.print(NOTICE)
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
    pipe, request, settings = prepare(prompt, model, size, steps, guidance, seed, device, dtype)
    from foveate import compare as side_by_side

    with progress() as track:
        page = side_by_side.compare(
            pipe, request, side_by_side.showcase(), out, settings=settings, rounds=rounds, track=track,
            notice="" if model else NOTICE,
        )  # fmt: skip
    console.print("open the page in a browser:")
    print(page.resolve())


def _method(name: str, tiles: str | None, options: list[str]) -> Method | None:
    pairs = {name: value for name, _, value in (option.partition("=") for option in options)}
    if tiles is not None:
        pairs["tiles"] = tiles
    if name != "dense":
        return method_from_text(name, pairs)
    if pairs:
        raise ValueError(f"dense takes no options ({', '.join(pairs)}): name a method, --method {next(iter(METHODS))}")
    return None
