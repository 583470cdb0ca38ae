"""What several commands share: options, checks, progress bars, error messages, and loading of models."""

import functools
import inspect
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from foveate.apps.demo import find
from foveate.apps.errors import remedy
from foveate.utils.processes import join, leave, rank_name
from foveate.utils.progress import Track

console = Console(stderr=True, highlight=False)

LanguageModel = Annotated[
    str,
    typer.Option(
        help="Hub id or folder of a causal language model. [dim]default: the built-in reader, which knows a few "
        "hundred words[/]"
    ),
]
Tiles = Annotated[str | None, typer.Option(help="Number of tiles of the method, or auto.")]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the method, as -o NAME=VALUE. Repeat it for more."),
]


def _check_seed(seed: int) -> int:
    """The seed, if random generators take it; a largest value of the option would fill its line in the help."""
    if seed >= 2**63:
        raise typer.BadParameter("a seed must be less than 2^63")
    return seed


Seed = Annotated[
    int, typer.Option(min=0, callback=_check_seed, help="Random seed: the same seed gives the same result.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
Embed = Annotated[
    str,
    typer.Option(
        help="Model of sentence-transformers that compares texts by meaning, such as all-MiniLM-L6-v2. Needs "
        "foveate\\[sentence-transformers]. [dim]default: none, words are compared[/]"
    ),
]
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


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that turns errors that a user can fix into one line and exit code 2, and Ctrl-C into exit code 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            _check_utf8(kwargs)
            command(*args, **kwargs)
            leave()
        except KeyboardInterrupt:
            console.print("stopped; everything that was finished is saved")
            raise typer.Exit(130) from None
        except (ValueError, ImportError, OSError, RuntimeError, MemoryError, AssertionError) as error:
            if rank := rank_name():
                error.add_note(rank)
                console.quiet = False  # also where only the first process prints
            if not (message := remedy(error)):
                raise
            where = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
            shown = (message + where).encode("utf-8", "replace").decode()  # a path may have bytes that are not UTF-8
            console.print(f"[bold red]error:[/] {escape(shown)}", soft_wrap=True)
            raise typer.Exit(2) from None

    # paragraphs fill any terminal, and foveate[ui] is no style of rich
    run.__doc__ = escape(re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or ""))
    return run


def _check_utf8(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text != (shown := text.encode("utf-8", "replace").decode()):
                raise ValueError(f"{name.replace('_', '-')} is not UTF-8 text: {shown}")


def open_reader(
    model: str, device: str, dtype: str, check: Callable[[Any], None] = lambda config: None
) -> tuple[Any, Any]:
    """The language model that `--model` names, or the built-in one, and its tokenizer; `check` takes its config."""
    folder = model or str(find("reader"))
    console.print(f"loading {model or 'the built-in reader'}")
    from transformers.utils import logging as transformers_logging

    from foveate.transformers.model import load

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return load(folder, device, dtype, check)


def warn_unknown_words(model: str, tokenizer: Any, text: str) -> None:
    """Print the words of a text that are not in the language model's vocabulary."""
    from foveate.transformers.model import unknown_words

    if not (words := unknown_words(tokenizer, text)):
        return
    more = f" and {len(words) - 8} more" if len(words) > 8 else ""
    remedy = "" if model else "; it knows a few hundred, see docs/built-in-reader.md, and --model names another one"
    console.print(f"the model does not know the words {escape(', '.join(words[:8]))}{more}: it will guess{remedy}")


def print_outcome(done: bool, result: Path) -> None:
    """Print whether a training run is complete, and the path of its result; only the first process prints."""
    console.print("done" if done else "stopped at the time limit; the same command resumes the run")
    if not console.quiet:
        print(result)


def join_processes(device: str) -> tuple[Any, str]:
    """See `foveate.utils.processes.join`, and the device of this process: only the first process prints from here on.

    Every process prints its errors.
    """
    state = join(device)
    console.quiet = not state.is_main_process
    return state, device if state.num_processes == 1 else str(state.device).replace("cpu:0", "cpu")


def training_device(name: str, *batches: int) -> str:
    """The device that this process trains on; only the first process prints.

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


def options_of(option: list[str] | None, tiles: str | None = None) -> dict[str, str]:
    """The options of a method as a dictionary, from a list of "NAME=VALUE" and the value of `--tiles`."""
    if bare := [text for text in option or [] if "=" not in text]:
        raise ValueError(f"option {bare[0]} has no value: write -o {bare[0]}=VALUE")
    pairs = {name: value for name, _, value in (text.partition("=") for text in option or [])}
    return pairs if tiles is None else {**pairs, "tiles": tiles}


def check_writable(folder: Path) -> None:
    """Raise a ValueError if nothing can be written into the folder."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"cannot write into {folder}, because {existing} is a file: name another --out")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"cannot write into {folder}: name another --out")


def check_file(path: Path, kind: str, suffix: str) -> None:
    """Raise a ValueError if `--out` is a folder or has another suffix."""
    if path.suffix.lower() != suffix or path.is_dir():
        raise ValueError(f"--out must name {kind}, not {path}: end it with {suffix}")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text file, one a line; empty lines do not count.

    Raises:
        ValueError: If there is no such file, or no prompt in it.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts {path}: name a text file with one prompt a line") from error
    if not lines:
        raise ValueError(f"{path} holds no prompts: write one a line")
    return lines


def print_table(rows: Mapping[str, str], *columns: str, title: str | None = None) -> None:
    """Print a table with two columns."""
    table = Table(columns[0], Column(columns[1], overflow="fold"), title=title)
    for cells in rows.items():
        table.add_row(*cells)
    Console().print(table)


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of "1024" or "1024x768"."""
    match = re.fullmatch(r"([1-9]\d{0,8})(?:x([1-9]\d{0,8}))?", text.strip().lower())
    if not match:
        raise ValueError(f"cannot read the size {text!r}: write 1024, or WIDTHxHEIGHT such as 1024x768")
    return int(match[2] or match[1]), int(match[1])


def _log_progress(name: str, length: int) -> Callable[[], None]:
    """A `Track` that prints a line at the start, every 10 seconds, and at the end."""
    done, start = 0, time.monotonic()
    shown = start
    console.print(f"{name}: 0 of {length}", markup=False)

    def advance() -> None:
        nonlocal done, shown
        done += 1
        if done == length or time.monotonic() - shown > 10:
            shown = time.monotonic()
            console.print(f"{name}: {done} of {length}, {shown - start:.0f} s", markup=False)

    return advance


@contextmanager
def progress() -> Generator[Track]:
    """Context that yields a function for progress bars: (name, length) starts one and returns what advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_terminal:  # a log: a line now and then
        yield _log_progress
        return
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:

        def track(name: str, length: int) -> Callable[[], None]:
            task = bars.add_task(name, total=length)
            return lambda: bars.advance(task)

        yield track
