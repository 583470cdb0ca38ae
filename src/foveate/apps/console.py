"""Common parts of all commands: options, progress bars, error messages, saved results."""

import functools
import inspect
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from foveate.apps.errors import remedy
from foveate.utils.files import write_whole
from foveate.utils.processes import join, leave, rank_name
from foveate.utils.progress import Track

__all__ = [
    "CheckpointMinutes",
    "Checkpointing",
    "Commit",
    "Compile",
    "CoolDown",
    "Device",
    "Dtype",
    "Minutes",
    "Out",
    "Rounds",
    "RunFolder",
    "SampleEvery",
    "Seed",
    "Sides",
    "StepModel",
    "StepText",
    "TimedMethods",
    "TrainingDevice",
    "TrainingDtype",
    "brief",
    "clear_errors",
    "console",
    "join_processes",
    "numbers",
    "print_outcome",
    "progress",
    "run_and_save",
    "terminal",
    "training_device",
]


def terminal(stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints names and texts as they are: a `[slug].md` is no markup, and a `:x:` no emoji.

    Styled text is a `rich.text.Text`.
    """
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


console = terminal(stderr=True)


def brief(text: str) -> str:
    """The text, cut after 60 characters."""
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check_seed(seed: int) -> int:
    """Check that random generators take the seed; a maximum in the option would fill its line in the help."""
    if seed >= 2**63:
        raise typer.BadParameter("a seed must be less than 2^63")
    return seed


Seed = Annotated[
    int, typer.Option(min=0, callback=_check_seed, help="Random seed: the same seed gives the same result.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the repeated blocks.")]
RunFolder = Annotated[Path, typer.Option(help="Folder of the run; an existing run is resumed.")]
CoolDown = Annotated[
    float, typer.Option(min=0, max=1, help="Last fraction of the steps, over which the learning rate falls to 0.")
]
TrainingDtype = Annotated[str, typer.Option(help="auto, float32, bfloat16: the weights stay in float32.")]
TrainingDevice = Annotated[str, typer.Option(help="auto or cpu. accelerate launch chooses the GPUs.")]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Use gradient checkpointing: slower, much less memory.")
]
Minutes = Annotated[
    float,
    typer.Option(
        min=0, help="Write a checkpoint and stop after this time. [dim]default: no limit[/]", show_default=False
    ),
]
CheckpointMinutes = Annotated[float, typer.Option(min=0, help="Minutes between checkpoints.")]
SampleEvery = Annotated[int, typer.Option(min=0, help="Steps between sheets of samples; 0: only at the end.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each candidate; the candidates take turns.")]
StepModel = Annotated[
    str,
    typer.Option(
        help="A size with random weights: built-in (17 M parameters), flux-dev (FLUX.1-dev, 12 B), flux2-dev (32 B), "
        "flux2-klein (4 B), qwen-image (20 B), z-image (6 B), sdxl (2.6 B, two samples for classifier-free guidance). "
        "Or your own pipeline: a hub id or a folder, with --method."
    ),
]
Sides = Annotated[
    str,
    typer.Option(
        help="Image tokens along each side, separated by commas: 64, ROWSxCOLUMNS, or FRAMESxROWSxCOLUMNS of a video. "
        "64 is 1024 px for FLUX, Qwen-Image and Z-Image, 256 px for the built-in model, and 1024 px for SDXL, where "
        "it counts the largest feature maps with attention; 21x45x80 is 81 frames of 720p for Wan."
    ),
]
TimedMethods = Annotated[
    list[str] | None,
    typer.Option(
        help="Method to time besides dense: hilberta; with options, toma:keep=0.25,dst_every=20; combined, "
        "hilberta:tiles=16+toma. Repeat the option for more. "
        "[dim]default: HilbertA and ToMA; for sdxl ToMA, ToMeSD, ToFu and ToDo[/]"
    ),
]
StepText = Annotated[int | None, typer.Option(min=0, help="Number of text tokens. [dim]default: 512; for sdxl 77[/]")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON file.")]
Commit = Annotated[str, typer.Option(help="Commit to record, if git cannot tell it.")]


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that turns errors that a user can fix into one line and exit code 2, and Ctrl-C into exit code 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            _check_values(kwargs)
            command(*args, **kwargs)
            leave()
        except KeyboardInterrupt:
            console.print("stopped; finished work is saved")
            raise typer.Exit(130) from None
        except (ValueError, ImportError, OSError, RuntimeError, MemoryError, AssertionError) as error:
            if rank := rank_name():
                error.add_note(rank)
                console.quiet = False  # also where only the first process prints
            if not (message := remedy(error)):
                raise
            where = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
            shown = (message + where).encode("utf-8", "replace").decode()  # a path may have bytes that are not UTF-8
            console.print(Text.assemble(("error:", "bold red"), f" {shown}"), soft_wrap=True)
            raise typer.Exit(2) from None

    # paragraphs fill any terminal, and foveate[ui] is no style of rich
    run.__doc__ = escape(re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or ""))
    return run


def _check_values(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, float) and isnan(value):  # is within every range
            raise ValueError(f"{name.replace('_', '-')} is {value}: give a number")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text != (shown := text.encode("utf-8", "replace").decode()):
                raise ValueError(f"{name.replace('_', '-')} is not UTF-8 text: {shown}")


def print_outcome(done: bool, result: Path) -> None:
    """Print whether a training run is complete, and its path, on the first process only."""
    console.print("done" if done else "stopped at the time limit; the same command resumes the run")
    if not console.quiet:
        print(result)


def join_processes(device: str) -> tuple[Any, str]:
    """Join processes (`foveate.utils.processes.join`) and return the device; then only the first process prints.

    Every process prints its errors.
    """
    state = join(device)
    console.quiet = not state.is_main_process
    return state, device if state.num_processes == 1 else str(state.device).replace("cpu:0", "cpu")


def training_device(name: str, *batches: int) -> str:
    """Training device of this process; then only the first process prints.

    Raises:
        ValueError: If the processes cannot share one of the batches evenly.
    """
    if name not in ("auto", "cpu"):
        raise ValueError(f"--device is auto or cpu here, not {name}: CUDA_VISIBLE_DEVICES says which GPUs there are")
    state, _ = join_processes(name)
    if state.num_processes > 1:
        console.print(f"training on {state.num_processes} devices")
    from foveate.training.run import split_batch

    for batch in batches:
        split_batch(batch, state.num_processes)
    return str(state.device)


def _log_progress(name: str, length: int) -> Callable[[], None]:
    """A `Track` that prints a line at the start, every 10 seconds, and at the end."""
    done, start = 0, time.monotonic()
    shown = start
    console.print(f"{name}: 0 of {length}")

    def advance() -> None:
        nonlocal done, shown
        done += 1
        if done == length or time.monotonic() - shown > 10:
            shown = time.monotonic()
            console.print(f"{name}: {done} of {length}, {shown - start:.0f} s")

    return advance


@contextmanager
def progress() -> Generator[Track]:
    """Context that yields a function for progress bars: (name, length) starts one and returns its advance function."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_terminal:  # a log: a line now and then
        yield _log_progress
        return
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:

        def track(name: str, length: int) -> Callable[[], None]:
            task = bars.add_task(name, total=length)
            return lambda: bars.advance(task)

        yield track


def numbers(text: str, kind: type = int) -> list[Any]:
    """The numbers in a comma-separated list."""
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
) -> None:
    """Write the JSON file after every result that `run` yields, and print the last result as a table.

    Args:
        path: The JSON file.
        commit: Commit to record; empty keeps what git says.
        run: Called with `track`; yields the results so far.
        table: Makes a table of a result.
    """
    result: dict[str, Any] = {"rows": []}
    with progress() as track:
        for result in run(track=track):
            if commit:
                result["versions"]["commit"] = commit
            write_whole(path, json.dumps(result, indent=2).encode() + b"\n")
    for one in result.get("skipped", []):
        console.print(f"skipped: {one['why']}")
    terminal().print(table(result))
    print(path)
