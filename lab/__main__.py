"""Commands of the lab: benchmarks against other implementations, and training of the built-in models."""

import os
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from foveate.apps.console import clear_errors

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "attention": "lab.bench.attention",
    "log-linear": "lab.bench.log_linear",
    "calls": "lab.bench.calls",
    "step-profile": "lab.bench.step_profile",
    "train": "lab.bench.train",
    "context": "lab.bench.context",
    "examples": "lab.bench.examples",
    "pretrained": "lab.quality.pretrained",
    "built-in": "lab.training.make",
    "video": "lab.training.video",
    "reader": "lab.training.reader",
    "atlas": "lab.training.atlas",
}
"""Module of each command, with its function `main`."""


class LazyCommands(TyperGroup):
    """Commands whose modules are imported on use, so that `attention` runs without diffusers, for example."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Command of this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = typer.Typer(rich_markup_mode="rich", add_completion=False)
        command.command(cmd_name)(clear_errors(import_module(COMMANDS[cmd_name]).main))
        return typer.main.get_command(command)


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, rich_markup_mode="rich", help=__doc__)


@app.callback()
def _group() -> None:
    """Commands of the lab."""


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    app(prog_name="python -m lab")
