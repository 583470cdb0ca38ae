"""The command that puts examples for in-context learning into blocks."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from foveate.cli.common import clear_errors, console, progress
from foveate.methods.sub_cp import STRATEGIES, SubCP

__all__ = ["icl"]

DRAWS = 10


@clear_errors
def icl(
    examples: Annotated[Path, typer.Argument(help=".csv with a line of names, or .jsonl: an example a line.")],
    text: Annotated[str, typer.Option(help="Column of the input text, which is embedded.")] = "text",
    label: Annotated[str, typer.Option(help="Column of the label, for --balance and the table.")] = "",
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help=".npy or .safetensors file with a row for each example. [dim]default: words and runs of three "
            "letters of the text, hashed to 512 numbers: offline, knows spelling and no meaning[/]"
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Embed with this model of sentence-transformers, e.g. all-MiniLM-L6-v2. Needs "
            "foveate\\[sentence-transformers]."
        ),
    ] = "",
    blocks: Annotated[int, typer.Option(help="How many blocks.")] = 8,
    size: Annotated[int, typer.Option(help="Examples of a block. 0 uses every example.")] = 8,
    strategy: Annotated[
        str,
        typer.Option(
            help="global_diverse: each block covers the pool. global_local: all together do. local_diverse: each "
            "covers a region. local_coherent: each is the middle of a region."
        ),
    ] = "global_local",
    order: Annotated[str, typer.Option(help="Inside a block: picked, or central_last.")] = "picked",
    balance: Annotated[
        str, typer.Option(help="Deal labels evenly: proportional to the pool, or equal. [dim]default: neither[/]")
    ] = "",
    out: Annotated[Path, typer.Option(help="Blocks to write, a line each; the plot goes beside it.")] = Path(
        "blocks.jsonl"
    ),
) -> None:
    """Put examples for in-context learning into blocks that cover a pool of examples (Sub-CP).

    A language model reads one block at a time: foveate.integrations.transformers.in_context has the hosts. The method
    is reconstructed from the abstract of its paper.

    The table compares with 10 random choices, and with 10 random deals of the same examples: what is gained over the
    first but not over the second is due to the choice, not to the blocks. Whether answers get better is not measured.

    foveate icl reviews.csv --text review --label stars --blocks 8 --size 8

    foveate icl pool.jsonl --embeddings pool.npy --strategy local_diverse --out regions.jsonl

    foveate icl pool.jsonl --label label --balance proportional --model all-MiniLM-L6-v2

    Each line of --out has "block", "ids" (lines of the pool, from 0) and "examples".
    """
    from foveate.examples import column, hashed_ngrams, read_embeddings, read_examples, sentence_embeddings
    from foveate.files import write_whole
    from foveate.ops.example_blocks import Blocks
    from foveate.report import draw_coverage, figure_png

    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    if embeddings and model:
        raise ValueError("--embeddings and --model both say where embeddings come from: give one of them")
    choice: Any = {"strategy": strategy, "order": order, "balance": balance or None}
    sub = SubCP(blocks=blocks, block_size=size or None, **choice)
    rows = read_examples(examples)
    labels = column(rows, label, examples) if label else None
    with progress() as track:
        if embeddings:
            pool = read_embeddings(embeddings)
            if len(pool) != len(rows):
                raise ValueError(f"{embeddings} has {len(pool)} rows for {len(rows)} examples: it is of another file")
        else:
            texts = column(rows, text, examples)
            pool = sentence_embeddings(texts, model, track) if model else hashed_ngrams(texts, track)
        ours = sub.partition(pool, labels=labels, track=track)
        chosen = torch.tensor([example for block in ours.ids for example in block])
        sizes, generator = [len(block) for block in ours.ids], torch.Generator().manual_seed(0)
        reports, advance = {f"Sub-CP {strategy}": [ours.report(labels)]}, track("random blocks", 2 * DRAWS)
        for name, among in (("random choice", torch.arange(len(rows))), ("random deal", chosen)):
            for _ in range(DRAWS):
                drawn = among[torch.randperm(len(among), generator=generator)[: len(chosen)]]
                dealt = Blocks([part.tolist() for part in drawn.split(sizes)], ours.pool)
                reports.setdefault(name, []).append(dealt.report(labels))
                advance()
    lines = [
        json.dumps({"block": b, "ids": ids, "examples": [rows[i] for i in ids]}, ensure_ascii=False)
        for b, ids in enumerate(ours.ids)
    ]
    write_whole(out, ("\n".join(lines) + "\n").encode())
    write_whole(out.with_suffix(".png"), figure_png(draw_coverage(reports)))
    Console().print(_table(reports))
    if repeated := reports[f"Sub-CP {strategy}"][0].duplicates:
        console.print(f"{repeated} chosen examples equal another one: blocks gain nothing by them")
    print(out)
    print(out.with_suffix(".png"))


def _table(reports: dict[str, list[Any]]) -> Table:
    """Means over the draws."""
    table = Table("what", *reports)
    for field in next(iter(reports.values()))[0]._fields:
        values = [[getattr(report, field) for report in drawn] for drawn in reports.values()]
        if values[0][0] is not None:
            table.add_row(field.replace("_", " "), *(f"{sum(drawn) / len(drawn):.3g}" for drawn in values))
    return table
