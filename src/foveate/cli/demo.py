"""Commands of the built-in models: what they are, and how to make them again."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from foveate.cli.common import Seed, clear_errors, console, progress

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
def train(
    part: Annotated[str, typer.Option(help="recogniser, vae, flow (which needs the vae), or all.")] = "all",
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is found there is gone on with.")] = Path(
        "demo-run"
    ),
    start: Annotated[
        Path | None, typer.Option(help="Train this pipeline folder further: only the last stage of the flow.")
    ] = None,
    seed: Seed = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Write a checkpoint and stop after so long.")] = float("inf"),
    scale: Annotated[
        float, typer.Option(min=0, help="Of the recipe's pictures and steps: 0.01 is a quick look.")
    ] = 1.0,
    batch: Annotated[
        float, typer.Option(min=0, help="Of the flow's batches, made for 140 GB of GPU memory: 0.01 fits a CPU.")
    ] = 1.0,
    sample_every: Annotated[int, typer.Option(min=0, help="Steps between sample pictures; 0: none.")] = 1000,
    compile: Annotated[bool, typer.Option(help="Compile the transformer (GPU; a minute for each size).")] = False,
) -> None:
    """Train the built-in model from scratch: the recogniser that judges it, the autoencoder, then the transformer.

    Stop it when you like, Ctrl-C or worse; the same command goes on from the newest checkpoint. On several GPUs:

    torchrun --nproc-per-node 4 -m foveate demo train --compile
    """
    from foveate.demo.training.make import make

    with progress() as track:
        done = make(
            out,
            part=part,
            start=start,
            seed=seed,
            minutes=minutes,
            scale=scale,
            batch=batch,
            sample_every=sample_every,
            compile=compile,
            track=track,
        )
    console.print("done" if done else "stopped in time; the same command goes on from here")
    print(out)


@app.command()
@clear_errors
def reader(
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is found there is gone on with.")] = Path(
        "reader-run"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Of training.")] = 3000,
    batch: Annotated[int, typer.Option(min=8, help="Texts of a step: 32 suit a CPU.")] = 256,
    layers: Annotated[int, typer.Option(min=2, help="Of the model.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Of the model, a multiple of 64.")] = 256,
    minutes: Annotated[float, typer.Option(min=0, help="Write a checkpoint and stop after so long.")] = float("inf"),
    seed: Seed = 0,
) -> None:
    """Train the built-in reader from scratch: a small Llama that answers questions about texts of facts.

    The folder "reader" of the run is what AutoModelForCausalLM and AutoTokenizer load. accuracy.csv tells how many
    questions of each kind it answers, every 1,000 steps. The same command goes on from the newest checkpoint.
    """
    from foveate.demo.training.reader import ReaderRecipe, train_reader

    recipe = ReaderRecipe(steps=steps, batch=batch, layers=layers, width=width, seed=seed)
    with progress() as track:
        done = train_reader(out, recipe, minutes=minutes, track=track)
    console.print((out / "accuracy.csv").read_text(), end="")
    console.print("done" if done else "stopped in time; the same command goes on from here")
    print(out / "reader")


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


@app.command()
@clear_errors
def atlas(
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("atlas.png"),
    font: Annotated[
        Path | None, typer.Option(help="NotoColorEmoji.ttf. [dim]default: where distributions put it[/]")
    ] = None,
) -> None:
    """Draw the emoji of scenes from the font. The package holds the result; only a new vocabulary needs another."""
    from foveate.demo.atlas import write_atlas

    write_atlas(out, font)
    print(out)
