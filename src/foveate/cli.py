"""The command line: arguments in, progress and clear errors out. All work is done elsewhere."""

import functools
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from foveate.methods import METHODS, Method, method_from_text
from foveate.ops.curves import CURVES

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Cheaper transformers that attend only where it matters: sparse attention in diffusers pipelines.",
)
console = Console(stderr=True, highlight=False)

Model = Annotated[
    str,
    typer.Option(help="Hub id or folder of a diffusers pipeline. Left out: a small Flux that comes with foveate."),
]
Size = Annotated[
    str | None, typer.Option(help="Pixels: 1024, or WIDTHxHEIGHT. [dim]default: 256 for the small Flux, else 1024[/]")
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="Denoising steps. [dim]default: 4 for the small Flux, else 28[/]"),
]
Guidance = Annotated[
    float | None, typer.Option(min=0, max=1000, help="Guidance scale. [dim]default: the pipeline's[/]")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the first noise: the same seed, the same picture.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
NOTICE = "The model has random weights: its pictures are noise. Times are real; quality cannot be judged."


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """One line and exit code 2 for what a user can mend; 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            console.print("stopped; what was finished is in place")
            raise typer.Exit(130) from None
        except (ValueError, ImportError, OSError) as error:
            _fail(str(error).strip())
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            _fail("out of memory: use a smaller --size, --dtype bfloat16, or a device with more memory")

    return run


def _fail(message: str) -> None:
    first_line = message.splitlines()[0] if message else "something failed without saying what"
    console.print(f"[bold red]error:[/] {escape(first_line)}", soft_wrap=True)
    raise typer.Exit(2)


def _out_of_memory(error: Exception) -> bool:
    known = "can't allocate memory", "not enough memory"  # what the CPU allocators say
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in known)


@app.command()
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
    pipe, request, settings = _prepare(prompt, model, size, steps, guidance, seed, device, dtype)
    from foveate.files import slug, write_picture
    from foveate.integrations.diffusers.apply import apply
    from foveate.integrations.diffusers.pipelines import draw

    path = out or Path(f"{slug(prompt)}-{seed}.png")
    with _progress() as track:
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


@app.command()
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
    pipe, request, settings = _prepare(prompt, model, size, steps, guidance, seed, device, dtype)
    from foveate import compare as side_by_side

    with _progress() as track:
        page = side_by_side.compare(
            pipe, request, side_by_side.showcase(), out, settings=settings, rounds=rounds, track=track,
            notice="" if model else NOTICE,
        )  # fmt: skip
    console.print("open the page in a browser:")
    print(page.resolve())


@app.command()
@clear_errors
def curves(
    curve: Annotated[str, typer.Argument(help=f"One of {', '.join(CURVES)}.")] = "hilbert",
    size: Annotated[str, typer.Option(help="Cells of the grid: 64, or WIDTHxHEIGHT.")] = "32",
    tiles: Annotated[int, typer.Option(min=1, help="Tiles to colour.")] = 16,
    centre: Annotated[float, typer.Option(min=0, max=1, help="Side of the global centre; 0 is none.")] = 0.25,
    phase: Annotated[int, typer.Option(min=0, max=3, help="By how many quarters of a tile the tiles have slid.")] = 0,
    out: Annotated[Path | None, typer.Option(help="PNG to write. [dim]default: CURVE-SIZE.png[/]")] = None,
) -> None:
    """Draw an order of a grid and its tiles as a picture, and print how local it is."""
    from foveate.files import write_whole
    from foveate.methods.hilberta import HilbertA
    from foveate.ops.curves import edge_average_stretch, geometric_distortion_error, grid_order
    from foveate.report import draw_order, figure_png

    height, width = _size(size)
    if height * width > 256 * 256:
        raise ValueError(f"{size} cells are too many to draw: use at most 256 x 256")
    plan = HilbertA(curve=curve, tiles=tiles, centre=centre).plan(((height, width),), 0)
    order = grid_order(curve, height, width)
    path = out or Path(f"{curve}-{width}x{height}.png")
    write_whole(path, figure_png(draw_order(order, height, width, plan.tile_maps[phase])))
    table = Table("metric", "all pairs", "within a tile")
    for name, metric in (("EAS", edge_average_stretch), ("GDE", geometric_distortion_error)):
        inside = metric(order, height, width, within=max(1, height * width // tiles))
        table.add_row(name, f"{metric(order, height, width):.2f}", f"{inside:.2f}")
    Console().print(table)
    print(path)


@app.command()
@clear_errors
def info() -> None:
    """Print versions, devices, and which backend runs each op where."""
    from foveate.compare import versions
    from foveate.ops import block_attention, dispatch

    del block_attention  # imported to register its backends
    table = Table("what", "value")
    for name, value in versions().items():
        table.add_row(name, value)
    for op in dispatch.ops():
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            table.add_row(f"{op} on {device}", dispatch.choose(op, torch.device(device)).name)
    table.add_row("methods", ", ".join(METHODS))
    Console().print(table)


def _prepare(
    prompt: str,
    model: str,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    device: str,
    dtype: str,
) -> tuple[Any, Any, dict[str, str]]:
    """(pipeline, request, settings), checked."""
    height, width = _size(size or ("1024" if model else "256"))
    steps = steps or (28 if model else 4)
    console.print(f"loading {model or 'the small Flux'}")
    try:
        from diffusers.utils import logging

        from foveate.demo.untrained import untrained_pipeline
        from foveate.integrations.diffusers.pipelines import Request, check_size, load, ready
    except ImportError as error:
        raise ValueError(f"drawing needs diffusers ({error}): pip install 'foveate[diffusers]'") from error
    logging.set_verbosity_error()
    pipe = load(model, device, dtype) if model else ready(untrained_pipeline(), device, dtype)
    check_size(pipe, (height, width))
    settings = {
        "prompt": prompt,
        "model": model or "foveate's small Flux, random weights",
        "size": f"{width} x {height} px",
        "steps": str(steps),
        "guidance": "the pipeline's own" if guidance is None else str(guidance),
        "seed": str(seed),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
    }
    return pipe, Request(prompt, (height, width), steps, guidance, seed), settings


def _method(name: str, tiles: str | None, options: list[str]) -> Method | None:
    pairs = {name: value for name, _, value in (option.partition("=") for option in options)}
    if tiles is not None:
        pairs["tiles"] = tiles
    if name != "dense":
        return method_from_text(name, pairs)
    if pairs:
        raise ValueError(f"dense takes no options ({', '.join(pairs)}): name a method, --method {next(iter(METHODS))}")
    return None


def _size(text: str) -> tuple[int, int]:
    """(height, width) of "1024" or "1024x768"."""
    match = re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", text.strip().lower())
    if not match:
        raise ValueError(f"cannot read the size {text!r}: write 1024, or WIDTHxHEIGHT such as 1024x768")
    return int(match[2] or match[1]), int(match[1])


@contextmanager
def _progress() -> Generator[Callable[[str, int], Callable[[], None]]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def track(name: str, length: int) -> Callable[[], None]:
            task = progress.add_task(name, total=length)
            return lambda: progress.advance(task)

        yield track


def main() -> None:
    """Entry point of the `foveate` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    app()
