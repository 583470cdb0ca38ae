"""Writes the table of docs/cli.md: `python docs/cli.py`. A test keeps it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from foveate.apps.cli import app

PAGE = Path(__file__).parent / "cli.md"
ROW = re.compile(r"^\| `(--[\w-]+).*?` \| (.*?) \| (.*?) \|$", re.MULTILINE)


def commands(group: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Name and definition of each command."""
    group = group or get_command(app)
    for called, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{called} ")
        else:
            yield f"{name}{called}", command


def options() -> dict[str, tuple[str, list[str]]]:
    """Spelling of each option, and the commands that take it, by its first name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for name, command in commands():
        for option in command.params:
            if option.param_type_name == "option" and option.name != "help":
                long = next(text for text in option.opts if text.startswith("--"))
                spelled = ", ".join([long, *(text for text in option.opts if text != long), *option.secondary_opts])
                found.setdefault(long, (spelled, []))[1].append(name)
    return dict(sorted(found.items()))


def table(meanings: dict[str, str]) -> str:
    """The table, with the meaning of each option."""
    rows = [
        f"| `{spelled}` | {meanings.get(option, '?')} | {', '.join(used)} |"
        for option, (spelled, used) in options().items()
    ]
    return "\n".join(["| option | meaning | commands |", "|---|---|---|", *rows]) + "\n"


def main() -> None:
    """Write the table anew, with the meanings that are there."""
    page = PAGE.read_text()
    before, _, rest = page.partition("| option |")
    meanings = {option: meaning for option, meaning, _ in ROW.findall(page)}
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table(meanings)}" + (f"\n{after}" if after else ""))


if __name__ == "__main__":
    main()
