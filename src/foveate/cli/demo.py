"""The commands about the built-in models."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from foveate.cli.common import Seed, clear_errors

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The built-in models: one draws scenes of emoji, one reads texts of facts.",
)


@app.command()
@clear_errors
def info() -> None:
    """Print size, training recipe, vocabulary and licences of the built-in models."""
    from foveate.demo.about import facts, reader_facts

    for title, rows in (("the model that draws", facts()), ("the model that reads", reader_facts())):
        table = Table("property", Column("value", overflow="fold"), title=title)
        for name, value in rows.items():
            table.add_row(name, value)
        Console().print(table)


@app.command()
@clear_errors
def texts(
    out: Annotated[Path, typer.Option(help="Folder to write; files of the same names are overwritten.")] = Path(
        "texts"
    ),
    seed: Seed = 0,
) -> None:
    """Write texts in the vocabulary of the built-in reader, to try `foveate rag` and `foveate icl` with.

    facts/*.txt are documents, questions.txt has questions about them, examples.csv has labelled examples. The right
    answers are printed.

    foveate rag texts/facts < texts/questions.txt
    """
    from foveate.demo.examples import write_examples

    for heading, answers in zip(("question", "text without a label"), write_examples(out, seed), strict=True):
        table = Table(heading, "right answer")
        for asked, answer in answers.items():
            table.add_row(asked, answer)
        Console().print(table)
    print(out)
