"""Commands of the built-in models: what they are, and how to make them again."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from foveate.cli.common import Seed, clear_errors

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="The built-in models: what they are, how they were made."
)


@app.command()
@clear_errors
def info() -> None:
    """Print size, recipe, vocabulary and licences of the built-in models: one draws, one reads."""
    from foveate.demo.about import facts, reader_facts

    for title, told in (("draws pictures", facts()), ("reads texts of facts", reader_facts())):
        table = Table("what", Column("value", overflow="fold"), title=title)
        for name, value in told.items():
            table.add_row(name, value)
        Console().print(table)


@app.command()
@clear_errors
def texts(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("texts"),
    seed: Seed = 0,
) -> None:
    """Write a small folder in the words of the built-in reader, to try `foveate rag` and `foveate icl` with.

    facts/*.txt are documents, questions.txt asks about them, examples.csv are labelled examples. The right answers
    are printed. What is found under these names is overwritten.

    foveate rag texts/facts < texts/questions.txt
    """
    from foveate.demo.examples import write_examples

    for about, answers in zip(("question", "text without a label"), write_examples(out, seed), strict=True):
        table = Table(about, "right answer")
        for asked, answer in answers.items():
            table.add_row(asked, answer)
        Console().print(table)
    print(out)
