"""The command that puts examples for in-context learning into blocks, and asks a language model with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from foveate.cli.common import Device, Dtype, clear_errors, console, open_reader, progress, say_unknown
from foveate.methods.sub_cp import STRATEGIES, SubCP

__all__ = ["icl"]

DRAWS = 10
HOSTS, MIXES = ("concatenate", "ensemble", "parallel_windows"), ("moe", "poe", "max")


@clear_errors
def icl(
    examples: Annotated[Path, typer.Argument(help=".csv with a line of names, or .jsonl: an example a line.")],
    text: Annotated[str, typer.Option(help="Column of the input text, which is embedded.")] = "text",
    label: Annotated[
        str, typer.Option(help="Column of the label or answer: for --balance, the table and --ask.")
    ] = "",
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help=".npy or .safetensors file with a row for each example. [dim]default: words and runs of three "
            "letters of the text, hashed to 512 numbers: offline, knows spelling and no meaning[/]"
        ),
    ] = None,
    embed: Annotated[
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
    max_similarity: Annotated[
        float, typer.Option(help="Examples whose cosine is larger never share a block. 0: copies may.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="Blocks to write, a line each; the plot goes beside it.")] = Path(
        "blocks.jsonl"
    ),
    ask: Annotated[
        list[str] | None, typer.Option(help="Ask a language model this, with the examples in front. Again for more.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="For --ask: folder or hub id of a causal language model. Left out: the built-in reader."),
    ] = "",
    template: Annotated[
        str,
        typer.Option(
            help="For --ask: how an example is read, with {text} and then {label} in it. [dim]default: on two lines, "
            "'text: {text}' and 'label: {label}', by the columns' names; for the built-in reader "
            "'{text} -> {label}. '[/]",
            show_default=False,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            help="For --ask: concatenate reads all blocks as one text, ensemble each by itself with the question, "
            "parallel_windows each by itself at the same positions."
        ),
    ] = "ensemble",
    mix: Annotated[
        str, typer.Option(help="Of an ensemble: moe is the weighted mean of probabilities; poe, max.")
    ] = "moe",
    tokens: Annotated[
        int, typer.Option(min=0, help="For --ask: write so many tokens at most. 0 chooses among the labels.")
    ] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Put examples for in-context learning into blocks that cover a pool of examples (Sub-CP).

    With --ask a language model reads them and answers; foveate.transformers.in_context has the hosts.
    The method is reconstructed from the abstract of its paper.

    The table compares with 10 random choices, and with 10 random deals of the same examples: what is gained over the
    first but not over the second is due to the choice, not to the blocks. Coverage is no accuracy: docs/results.md has
    what was measured of that.

    foveate icl reviews.csv --text review --label stars --blocks 8 --size 8

    foveate icl pool.jsonl --embeddings pool.npy --strategy local_diverse --out regions.jsonl

    foveate icl pool.jsonl --label label --balance proportional --embed all-MiniLM-L6-v2

    foveate icl reviews.csv --text review --label stars --ask "Not worth the money." --model Qwen/Qwen3-0.6B

    foveate icl texts/examples.csv --label label --blocks 4 --ask "goat tiger hen"

    The last asks the built-in reader about examples in its words, which `foveate demo texts` writes. The blocks of an
    ensemble count by how near their best example is to the question, unless embeddings are of a file.

    Each line of --out has "block", "ids" (lines of the pool, from 0), "examples", and a fingerprint: blocks of
    the same embeddings and settings are read from there, not made again.
    """
    from foveate.transformers.examples import (
        column,
        hashed_ngrams,
        read_embeddings,
        read_examples,
        sentence_embeddings,
    )
    from foveate.transformers.saved_blocks import write_blocks
    from foveate.utils.files import write_whole
    from foveate.web.report import draw_coverage, figure_png

    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    if embeddings and embed:
        raise ValueError("--embeddings and --embed both say where embeddings come from: give one of them")
    if ask and not label:
        raise ValueError("--ask needs --label, the column of the answers")
    for name, value, known in (("--host", host, HOSTS), ("--mix", mix, MIXES)):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value}")
    template = template or (f"{text}: {{text}}\n{label}: {{label}}\n\n" if model else "{text} -> {label}. ")
    if "{text}" not in template.partition("{label}")[0] or "{label}" not in template:
        raise ValueError(
            f"--template has {{text}} and then {{label}} in it, such as 'Q: {{text}} A: {{label}}', not {template!r}"
        )
    if out.suffix.lower() != ".jsonl" or out.is_dir() or out.resolve() == examples.resolve():
        raise ValueError(
            f"--out names the blocks to write, not {out}: end it with .jsonl, and leave the examples alone"
        )
    if not all(question.strip() for question in ask or ()):
        raise ValueError("--ask is empty: write the text whose label you want to know")
    reader = open_reader(model, device, dtype) if ask else None
    choice: Any = {"strategy": strategy, "order": order, "balance": balance or None}
    sub = SubCP(blocks=blocks, block_size=size or None, max_similarity=max_similarity or None, **choice)
    rows = read_examples(examples)
    labels = column(rows, label, examples) if label else None
    with progress() as track:

        def embedded(texts: Sequence[str]) -> torch.Tensor:
            return sentence_embeddings(texts, embed, track) if embed else hashed_ngrams(texts, track)

        if embeddings:
            pool = read_embeddings(embeddings)
            if len(pool) != len(rows):
                raise ValueError(f"{embeddings} has {len(pool)} rows for {len(rows)} examples: it is of another file")
        else:
            pool = embedded(column(rows, text, examples))
        ours = _read_or_make(out, sub, pool, labels, track)
        reports = _compared(f"Sub-CP {strategy}", ours, labels, track)
        weights: list[Any] = [None] * len(ask or [])
        if ask and not embeddings:
            weights = list(ours.weights(embedded(ask)).T)
    write_blocks(out, ours, pool, sub, labels=labels, examples=rows)
    write_whole(out.with_suffix(".png"), figure_png(draw_coverage(reports)))
    Console().print(_table(reports))
    if repeated := reports[f"Sub-CP {strategy}"][0].duplicates:
        console.print(f"{repeated} chosen examples equal another one: blocks gain nothing by them")
    print(out)
    print(out.with_suffix(".png"))
    if reader and ask and labels:
        from foveate.transformers.asking import read_examples as read_texts

        if host == "ensemble" and embeddings:
            local = strategy.startswith("local")
            console.print(
                "blocks count the same: --embeddings has none of the question"
                + (f"; {strategy} needs blocks that count by how near they are" if local else "")
            )
        told = [
            template.replace("{text}", shown).replace("{label}", answer)
            for shown, answer in zip(column(rows, text, examples), labels, strict=True)
        ]
        say_unknown(model, reader[1], "\n".join([*told, *ask]))
        asked = read_texts(*reader, [[told[i] for i in block] for block in ours.ids], host)
        before = template.partition("{label}")[0]
        space = before[len(before.rstrip()) :]  # belongs to the answer's first token
        for question, weight in zip(ask, weights, strict=True):
            print(question)
            shown = before.rstrip().replace("{text}", question)
            _answer(asked, shown, {space + answer: answer for answer in sorted(set(labels))}, tokens, weight, mix)


def _read_or_make(out: Path, sub: SubCP, pool: Any, labels: Sequence[str] | None, track: Any) -> Any:
    """The blocks of an earlier run with the same embeddings and settings, or new ones."""
    from foveate.transformers.saved_blocks import read_blocks

    if out.exists():
        try:
            found = read_blocks(out, pool, sub, labels=labels)
        except ValueError:
            return sub.partition(pool, labels=labels, track=track)
        console.print(f"{out} holds the blocks of these embeddings and settings")
        return found
    return sub.partition(pool, labels=labels, track=track)


def _compared(name: str, ours: Any, labels: Sequence[str] | None, track: Any) -> dict[str, list[Any]]:
    """What the blocks are like, and random ones and random deals of the same examples."""
    chosen = torch.tensor([example for block in ours.ids for example in block])
    sizes, generator = [len(block) for block in ours.ids], torch.Generator().manual_seed(0)
    reports, advance = {name: [ours.report(labels)]}, track("random blocks", 2 * DRAWS)
    for kind, among in (("random choice", torch.arange(len(ours.pool))), ("random deal", chosen)):
        for _ in range(DRAWS):
            drawn = among[torch.randperm(len(among), generator=generator)[: len(chosen)]]
            dealt = ours._replace(ids=[part.tolist() for part in drawn.split(sizes)])
            reports.setdefault(kind, []).append(dealt.report(labels))
            advance()
    return reports


def _answer(reader: Any, question: str, labels: dict[str, str], tokens: int, weights: Any, mix: Any) -> None:
    """Print what the model writes, or how probable each label is as it is written there, the likeliest first."""
    if tokens:
        print(reader.write(question, tokens, weights, mix))
        return
    said = reader.choose(question, list(labels), weights, mix).tolist()
    table = Table("answer", "probability")
    for probability, label in sorted(zip(said, labels.values(), strict=True), reverse=True):
        table.add_row(label, f"{probability:.3f}")
    Console().print(table)


def _table(reports: dict[str, list[Any]]) -> Table:
    """Means over the draws."""
    table = Table("what", *reports)
    for field in next(iter(reports.values()))[0]._fields:
        values = [[getattr(report, field) for report in drawn] for drawn in reports.values()]
        if values[0][0] is not None:
            table.add_row(field.replace("_", " "), *(f"{sum(drawn) / len(drawn):.3g}" for drawn in values))
    return table
