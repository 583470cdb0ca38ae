"""`foveate demo`: the commands about the built-in models."""

from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import check_writable, print_table
from foveate.apps.console import Device, Seed, clear_errors, console, progress

__all__ = ["app"]

SHOWN = 4

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The built-in models: three generate scenes of emoji, one answers questions about facts.",
)


@app.command()
@clear_errors
def info() -> None:
    """Print size, training recipe, vocabulary and licences of the built-in models."""
    from foveate.apps.demo.about import model_info, pixel_model_info, reader_info, video_model_info

    everything = {
        "image model": model_info(),
        "pixel model": pixel_model_info(),
        "video model": video_model_info(),
        "reader": reader_info(),
    }
    for title, rows in everything.items():
        print_table(rows, "property", "value", title=title)


@app.command()
@clear_errors
def page(
    out: Annotated[
        Path, typer.Option(help="Folder for the pages and their images; an existing run is resumed.")
    ] = Path("demo"),
    device: Device = "auto",
) -> None:
    """Write a page that shows what Foveate is: images, a video, and measured speeds.

    make demo does this in a clone.
    """
    check_writable(out)
    import_module("imageio_ffmpeg")  # fails early if packages are missing
    from foveate.apps.demo.page import write_pages
    from foveate.pipelines.request import quiet

    quiet()
    with progress() as track:
        path = write_pages(out, device, track)
    console.print("open the page in a browser:")
    print(path.resolve())


@app.command()
@clear_errors
def texts(
    out: Annotated[Path, typer.Option(help="Folder to write; files of the same names are overwritten.")] = Path(
        "texts"
    ),
    seed: Seed = 0,
) -> None:
    """Write texts in the vocabulary of the built-in reader, to try `foveate rag` and `foveate icl` with.

    facts/*.txt are documents, questions.txt has 200 questions about them with the right answers, examples.csv has
    labelled examples. The first questions are printed.

    foveate rag texts/facts --compare < texts/questions.txt
    """
    from foveate.apps.demo.examples import write_examples

    check_writable(out)
    for heading, answers in zip(("question", "text without a label"), write_examples(out, seed), strict=True):
        print_table(dict(islice(answers.items(), SHOWN)), heading, "right answer")
    print(out)
