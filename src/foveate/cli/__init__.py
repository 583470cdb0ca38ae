"""The command line: arguments in, progress and clear errors out. All work is done elsewhere."""

import os

import typer

from foveate.cli import bench, demo, distill, draw, icl, inspect, rag, train

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Cheaper transformers that attend only where it matters: pictures with sparse attention and merged tokens, "
    "training, long contexts.",
)
app.command()(draw.generate)
app.command()(draw.compare)
app.command("eval")(draw.evaluate)
app.command()(distill.distill)
app.command()(train.train)
app.command()(icl.icl)
app.command()(rag.rag)
app.command()(inspect.curves)
app.command()(inspect.info)
app.add_typer(bench.app, name="bench")
app.add_typer(demo.app, name="demo")


def main() -> None:
    """Entry point of the `foveate` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    app()
