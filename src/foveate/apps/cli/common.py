"""Common parts of commands: options, checks, tables, and loading of language models."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from foveate.apps.console import console, terminal
from foveate.apps.demo import find

LanguageModel = Annotated[
    str,
    typer.Option(
        help="Hub id or folder of a causal language model, or a .gguf file. [dim]default: the built-in reader, which "
        "knows a few hundred words[/]"
    ),
]
Tiles = Annotated[str | None, typer.Option(help="Number of tiles of the method, or auto.")]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the method, as -o NAME=VALUE. Repeat it for more."),
]


Embed = Annotated[
    str,
    typer.Option(
        help="Model of sentence-transformers that compares texts by meaning, such as all-MiniLM-L6-v2. Needs "
        "foveate\\[sentence-transformers]. [dim]default: none, words are compared[/]"
    ),
]


def open_reader(
    model: str, device: str, dtype: str, check: Callable[[Any], None] = lambda config: None
) -> tuple[Any, Any]:
    """Load the language model of `--model`, or the built-in one, and its tokenizer; `check` takes its config."""
    folder = model or str(find("reader"))
    console.print(f"loading {model or 'the built-in reader'}")
    from transformers.utils import logging as transformers_logging

    from foveate.transformers.model import load_model

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return load_model(folder, device, dtype, check)


def warn_unknown_words(model: str, tokenizer: Any, text: str) -> None:
    """Print the words of a text that are not in the language model's vocabulary."""
    from foveate.transformers.model import unknown_words

    if not (words := unknown_words(tokenizer, text)):
        return
    more = f" and {len(words) - 8} more" if len(words) > 8 else ""
    remedy = "" if model else "; it knows a few hundred, see docs/built-in-reader.md, and --model names another one"
    console.print(f"the model does not know the words {', '.join(words[:8])}{more}: it will guess{remedy}")


def options_of(option: list[str] | None, tiles: str | None = None) -> dict[str, str]:
    """Options of a method as a dictionary, from "NAME=VALUE" texts and the value of `--tiles`."""
    from foveate.methods import options_from_pairs

    return options_from_pairs([*(option or []), *([] if tiles is None else [f"tiles={tiles}"])])


def check_writable(folder: Path) -> None:
    """Raise a ValueError if nothing can be written into the folder; nothing is left in it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"cannot write into {folder}, because {existing} is a file: name another --out")
    try:
        TemporaryFile(dir=existing).close()  # permissions alone do not tell
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}): name another --out") from error


def free_port(host: str, port: int) -> int:
    """Return the port, or a free port for 0.

    Raises:
        ValueError: If the port is not available.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}, port {port} ({os.strerror(error.errno or 0)}): name another --port"
        ) from error


def check_file(path: Path, kind: str, suffix: str) -> None:
    """Raise a ValueError if `--out` is a folder, has another suffix, or cannot be written."""
    if path.suffix.lower() != suffix or path.is_dir():
        raise ValueError(f"--out must name {kind}, not {path}: end it with {suffix}")
    check_writable(path.parent)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, one a line; empty lines are skipped.

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
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for cells in rows.items():
        table.add_row(*cells)
    terminal().print(table)


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of "1024" or "1024x768"."""
    match = re.fullmatch(r"([1-9]\d{0,8})(?:x([1-9]\d{0,8}))?", text.strip().lower())
    if not match:
        raise ValueError(f"cannot read the size {text!r}: write 1024, or WIDTHxHEIGHT such as 1024x768")
    return int(match[2] or match[1]), int(match[1])
