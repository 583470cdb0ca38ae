"""Commands that measure speed: of attention, of one step of denoising or training, of contexts and of examples."""

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foveate.cli.common import Device, Dtype, clear_errors, progress, read_method

__all__ = ["Commit", "Out", "Rounds", "app", "numbers", "run_and_save"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Check, then time: ours and its peers in one process."
)

Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured; all take turns.")]
Out = Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")]
Commit = Annotated[str, typer.Option(help="The commit that is timed, where git cannot tell.")]


@app.command()
@clear_errors
def step(
    model: Annotated[
        str,
        typer.Option(
            help="Whose size, with random weights: built-in (17 M parameters), flux-dev (FLUX.1-dev, 12 B), "
            "sdxl (2.6 B; two samples, as guidance has them)."
        ),
    ] = "built-in",
    sides: Annotated[
        str,
        typer.Option(
            help="Image tokens along each side. 64 is 1024 px of FLUX.1, and of SDXL, whose largest maps with "
            "attention are counted; 256 px of the built-in model."
        ),
    ] = "64",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="What to time besides dense: hilberta, with options toma:keep=0.25,dst_every=20, several at once "
            "hilberta:tiles=16+toma. Repeat it for more. "
            "[dim]default: HilbertA and ToMA; of sdxl ToMA, ToMeSD, ToFu and ToDo[/]"
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the repeated blocks.")] = False,
    text: Annotated[
        int | None, typer.Option(min=0, help="Text tokens. [dim]default: 512, of sdxl 77, as the models have[/]")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each is timed; those that merge for whole cycles of their schedule.")
    ] = 9,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one denoising step of a model with random weights, dense and with methods, reorder and plans included.

    A profile tells which parts of a run that merges go into merging and into plans.
    Of SDXL it also prints what merging and unmerging lose of random and of smooth features: there are no pictures.

    foveate bench step --method toma --method toma:dst_every=20,weights_every=10      # any machine

    foveate bench step --model flux-dev --compile --sides 64,128                      # a GPU with 40 GB or more

    foveate bench step --model sdxl --compile                                         # a GPU with 16 GB or more
    """
    from foveate.demo.bench import bench_step, table_of
    from foveate.utils.device import choose_device

    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else the profiler says when it begins and ends
    methods = [read_method(text) for text in method or []]
    name = f"step-{model}-{'compiled' if compile else 'eager'}"
    run = partial(
        bench_step,
        numbers(sides), model=model, methods=methods, compile=compile, text=text, rounds=rounds, device=device,
        dtype=dtype,
    )  # fmt: skip
    run_and_save(out / f"{name}-{choose_device(device).type}.json", commit, run, table_of)


def numbers(text: str, kind: type = int) -> list[Any]:
    """The numbers of a comma-separated list."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        what, like = ("whole numbers", "64,128") if kind is int else ("numbers", "0.25,0")
        raise ValueError(f"{text!r} is no list of {what}: write them as {like}") from None


def run_and_save(
    path: Path,
    commit: str,
    run: Callable[..., Iterable[dict[str, Any]]],
    table: Callable[[dict[str, Any]], Any],
    draw: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Write every result as it comes, with its plot if there is one, and print the last."""
    from foveate.utils.files import write_whole
    from foveate.web.report import figure_png

    result: dict[str, Any] = {"rows": []}
    with progress() as track:
        for result in run(track=track):
            if commit:
                result["versions"]["commit"] = commit
            write_whole(path, json.dumps(result, indent=2).encode() + b"\n")
            if draw:
                write_whole(path.with_suffix(".png"), figure_png(draw(result)))
    Console().print(table(result))
    print(path)
