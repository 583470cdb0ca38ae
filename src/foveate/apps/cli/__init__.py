"""The command line: arguments, progress and error messages; the work is in the library."""

import os
from typing import Annotated

from foveate.apps.errors import require

require("typer", "rich", "jinja2", "matplotlib", "PIL", "skimage")

import typer  # noqa: E402

import foveate  # noqa: E402
from foveate.apps.cli import (  # noqa: E402
    bench,
    compare,
    demo,
    distill,
    evaluate,
    generate,
    icl,
    inspect,
    rag,
    rag_serve,
    serve,
    train,
    tune,
    ui,
)

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Make transformers cheaper by spending attention only where it matters.\n\n"
    "Images: sparse attention (HilbertA, LLSA) and token merging (ToMA) for diffusion models.\n\n"
    "Text: cached long contexts (InfoFlow KV) and blocks of in-context examples (Sub-CP).\n\n"
    'Start with:  foveate compare "a red apple above a blue car"',
)


def _print_version(asked: bool) -> bool:
    if asked:
        print(f"foveate {foveate.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `foveate` without a command."""


for command, name, panel in (
    (generate.generate, "generate", "Images and videos"),
    (compare.compare, "compare", "Images and videos"),
    (evaluate.evaluate, "eval", "Images and videos"),
    (tune.tune, "tune", "Images and videos"),
    (ui.ui, "ui", "Images and videos"),
    (serve.serve, "serve", "Images and videos"),
    (icl.icl, "icl", "Text"),
    (distill.distill, "distill", "Training"),
    (train.train, "train", "Training"),
    (inspect.curves, "curves", "Look inside"),
    (inspect.info, "info", "Look inside"),
):
    app.command(name, rich_help_panel=panel)(command)
rag.app.command("serve")(rag_serve.serve)
app.add_typer(rag.app, name="rag", rich_help_panel="Text")
app.add_typer(bench.app, name="bench", rich_help_panel="Look inside")
app.add_typer(demo.app, name="demo", rich_help_panel="Look inside")


def main() -> None:
    """Run the `foveate` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    app()
