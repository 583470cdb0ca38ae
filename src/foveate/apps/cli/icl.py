"""`foveate icl`: split examples for in-context learning into blocks, and ask a language model with them."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from foveate.apps.cli.common import Embed, LanguageModel, check_file, open_reader, warn_unknown_words
from foveate.apps.console import Device, Dtype, clear_errors, console, progress, terminal

__all__ = ["icl"]

DRAWS = 10
SHOWN = 5  # lost labels


@clear_errors
def icl(
    examples: Annotated[
        Path,
        typer.Argument(
            help="Examples: a .csv file with column names in its first line, or .jsonl with an object per line."
        ),
    ],
    text: Annotated[str, typer.Option(help="Column with the input text, which is embedded.")] = "text",
    label: Annotated[
        str, typer.Option(help="Column with the label or answer, used by --balance, --ask and the table.")
    ] = "",
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help=".npy or .safetensors file with one row for each example. [dim]default: words and letter trigrams of "
            "the text, hashed to 512 dimensions: offline, compares spelling and not meaning[/]"
        ),
    ] = None,
    embed: Embed = "",
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 8,
    block_size: Annotated[int, typer.Option(min=0, help="Examples in a block. 0 uses all examples.")] = 8,
    strategy: Annotated[
        Literal["global_diverse", "global_local", "local_diverse", "local_coherent"],
        typer.Option(
            help="global_diverse: each block covers the pool. global_local: all blocks together cover it. "
            "local_diverse: each block covers one region. local_coherent: each block is the centre of one region."
        ),
    ] = "global_local",
    order: Annotated[
        Literal["picked", "central_last"], typer.Option(help="Order inside a block: picked, or central_last.")
    ] = "picked",
    balance: Annotated[
        Literal["proportional", "equal"] | None,
        typer.Option(help="Balance the labels: proportional to the pool, or equal. [dim]default: no balance[/]"),
    ] = None,
    max_similarity: Annotated[
        float, typer.Option(help="Examples with a larger cosine similarity never share a block. 0 sets no limit.")
    ] = 0.0,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Skip examples that cannot be used, and list them beside --out."),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="File of blocks to write, one per line; the plot is written beside it.")
    ] = Path("blocks.jsonl"),
    ask: Annotated[
        list[str] | None,
        typer.Option(help="Question for a language model that has read the examples. May be repeated."),
    ] = None,
    model: LanguageModel = "",
    template: Annotated[
        str,
        typer.Option(
            help="For --ask: text of an example, with {text} and then {label} in it. [dim]default: two lines, "
            "'text: {text}' and 'label: {label}', with the columns' names; for the built-in reader "
            "'{text} -> {label}. '[/]",
            show_default=False,
        ),
    ] = "",
    combine: Annotated[
        Literal["concatenate", "ensemble", "parallel_windows"],
        typer.Option(
            help="For --ask: concatenate reads all blocks as one text, ensemble asks each block separately, "
            "parallel_windows reads the blocks separately at the same positions."
        ),
    ] = "ensemble",
    mix: Annotated[
        Literal["moe", "poe", "max"],
        typer.Option(
            help="Mix of an ensemble: weighted mean of probabilities (moe), weighted product (poe), or largest (max)."
        ),
    ] = "moe",
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="For --ask: generate at most this many tokens. 0 chooses among the labels.")
    ] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Split examples for in-context learning into blocks that cover a pool of examples (Sub-CP).

    With --ask, the model reads the blocks and answers. The method is reconstructed from the abstract of its paper.

    The table compares with 10 random choices of examples, and with 10 random partitions of the same examples. A gain
    over the first but not over the second is due to the choice of examples, not to the blocks. Coverage is not
    accuracy; docs/sub-cp.md has measured accuracies.

    foveate icl reviews.csv --text review --label stars --blocks 8 --block-size 8

    foveate icl pool.jsonl --embeddings pool.npy --strategy local_diverse --out regions.jsonl

    foveate icl pool.jsonl --label label --balance proportional --embed all-MiniLM-L6-v2

    foveate icl reviews.csv --text review --label stars --ask "Not worth the money." --model Qwen/Qwen3-0.6B

    foveate icl texts/examples.csv --label label --blocks 4 --ask "goat tiger hen"

    The last command asks the built-in reader about examples of `foveate demo texts`. The blocks of an ensemble are
    weighted by the similarity of their nearest example to the question, except with --embeddings.

    Each line of --out has "block", "ids" (examples of the file, from 0), "examples", and a fingerprint. Blocks of
    the same embeddings and settings are read from there again.
    """
    from foveate.methods.sub_cp import SubCP
    from foveate.plots.figures import draw_coverage, figure_png
    from foveate.transformers.embeddings import hashed_ngrams, read_embeddings, sentence_embeddings
    from foveate.transformers.examples import column, read_examples, usable, write_blocks
    from foveate.utils.files import write_whole

    if embeddings and embed:
        raise ValueError("--embeddings and --embed exclude each other: give one of them")
    if embed:
        import_module("sentence_transformers")  # fails early if packages are missing
    if ask and not label:
        raise ValueError("--ask needs --label, the column with the answers")
    if balance and not label:
        raise ValueError("--balance needs --label, the column with the labels")
    template = template or (f"{text}: {{text}}\n{label}: {{label}}\n\n" if model else "{text} -> {label}. ")
    if "{text}" not in template.partition("{label}")[0] or "{label}" not in template:
        raise ValueError(
            f"--template must have {{text}} and then {{label}}, such as 'Q: {{text}} A: {{label}}', not {template!r}"
        )
    check_file(out, "a file of blocks", ".jsonl")
    if out.resolve() == examples.resolve():
        raise ValueError(f"--out must name a file of blocks, not {out}, which holds the examples: name another file")
    needed = r"\S" if embed or embeddings else r"\w"  # without a model, words are compared
    if wordless := [question for question in ask or () if not re.search(needed, question)]:
        raise ValueError(f"--ask {wordless[0]!r} has no words: give the text whose label you want to know")
    reader = None
    if ask:
        from foveate.transformers.in_context import check_reads_blocks

        reader = open_reader(model, device, dtype, check_reads_blocks)
    sub = SubCP(
        blocks=blocks,
        block_size=block_size or None,
        strategy=strategy,
        order=order,
        balance=balance,
        max_similarity=max_similarity or None,
    )
    bad: dict[int, str] = {}
    rows = read_examples(examples, bad if skip_bad else None)
    given = read_embeddings(embeddings) if embeddings else None
    if given is not None and len(given) != len(rows):
        raise ValueError(f"{embeddings} has {len(given)} rows for {len(rows)} examples: embed these examples")
    numbers = None
    if skip_bad:
        _note_bad(rows, given, text, embed, bad)
        numbers = usable(rows, [name for name in (text if given is None or ask else "", label) if name], examples, bad)
        rows, given = [rows[i] for i in numbers], None if given is None else given[numbers]
        _list_bad(bad, out.with_suffix(".skipped.jsonl"))
    labels = column(rows, label, examples) if label else None
    with progress() as track:

        def embedded(texts: Sequence[str]) -> Any:
            return sentence_embeddings(texts, embed, track) if embed else hashed_ngrams(texts, track)

        pool = embedded(column(rows, text, examples)) if given is None else given
        ours = _read_or_make(out, sub, pool, labels, numbers, track)
        reports = _compared(f"Sub-CP {strategy}", ours, labels, track)
        weights: list[Any] = [None] * len(ask or [])
        if ask and not embeddings:
            weights = list(ours.weights(embedded(ask)).T)
    write_blocks(out, ours, pool, sub, labels=labels, examples=rows, numbers=numbers)
    write_whole(out.with_suffix(".png"), figure_png(draw_coverage(reports)))
    terminal().print(_table(reports))
    if repeated := reports[f"Sub-CP {strategy}"][0].duplicates:
        console.print(f"{repeated} chosen examples are copies of another one, which adds nothing to the blocks")
    if labels:
        _warn_lost(ours, labels, balance)
    print(out)
    print(out.with_suffix(".png"))
    if reader and ask and labels:
        from foveate.transformers.in_context import prompt_with

        if combine == "ensemble" and embeddings:
            local = strategy.startswith("local")
            console.print(
                "all blocks weigh the same, because --embeddings has no embedding of the question"
                + (f"; {strategy} needs weights that depend on the question" if local else "")
            )
        told = [
            template.replace("{text}", shown).replace("{label}", answer)
            for shown, answer in zip(column(rows, text, examples), labels, strict=True)
        ]
        warn_unknown_words(model, reader[1], "\n".join([*told, *ask]))
        prompted = prompt_with(*reader, [[told[i] for i in block] for block in ours.ids], combine)
        _print_answers(prompted, list(zip(ask, weights, strict=True)), template, labels, max_new_tokens, mix)


def _note_bad(rows: Sequence[dict[str, Any]], given: Any, text: str, embed: str, bad: dict[int, str]) -> None:
    """Note examples without an embedding: those without words, or whose given embedding is NaN, infinite or 0."""
    if given is not None:
        for index in (~given.isfinite().all(1) | (given == 0).all(1)).nonzero()[:, 0].tolist():
            bad.setdefault(index, f"the embedding of example {index} is NaN, infinite or 0")
    elif not embed:
        for index, row in enumerate(rows):
            if str(row.get(text, "")).strip() and not re.search(r"\w", str(row[text])):
                bad[index] = f"example {index} has no words: {str(row[text])!r}"


def _list_bad(bad: dict[int, str], path: Path) -> None:
    from foveate.utils.files import write_whole

    lines = [json.dumps({"example": index, "reason": bad[index]}, ensure_ascii=False) + "\n" for index in sorted(bad)]
    write_whole(path, "".join(lines).encode())
    console.print(f"skipped {len(bad)} examples, listed in {path}")


def _warn_lost(ours: Any, labels: Sequence[str], balance: str | None) -> None:
    """Tell which labels of the pool the blocks lack."""
    lost = ours.lost(labels)
    if not lost:
        return
    shown = ", ".join(f"{label!r} ({count} in the pool)" for label, count in list(lost.items())[:SHOWN])
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    remedy = "use more or larger blocks" if balance else "use --balance proportional or equal, with a global strategy"
    console.print(f"no block has an example of {len(lost)} of {len(set(labels))} labels: {shown}{more}; {remedy}")


def _read_or_make(
    out: Path, sub: Any, pool: Any, labels: Sequence[str] | None, numbers: Sequence[int] | None, track: Any
) -> Any:
    """Blocks of an earlier run with the same embeddings and settings, or new ones."""
    from foveate.transformers.examples import read_blocks

    with suppress(ValueError, FileNotFoundError):
        found = read_blocks(out, pool, sub, labels=labels, numbers=numbers)
        console.print(f"{out} holds the blocks of these embeddings and settings")
        return found
    return sub.partition(pool, labels=labels, track=track)


def _compared(name: str, ours: Any, labels: Sequence[str] | None, track: Any) -> dict[str, list[Any]]:
    """Reports of our blocks, random choices of examples, and random partitions of the same examples."""
    import torch

    chosen = torch.tensor([example for block in ours.ids for example in block])
    sizes, generator = [len(block) for block in ours.ids], torch.Generator().manual_seed(0)
    reports, advance = {name: [ours.report(labels)]}, track("random blocks", 2 * DRAWS)
    for kind, among in (("random choice", torch.arange(len(ours.pool))), ("random partition", chosen)):
        for _ in range(DRAWS):
            drawn = among[torch.randperm(len(among), generator=generator)[: len(chosen)]]
            blocks = ours._replace(ids=[part.tolist() for part in drawn.split(sizes)])
            reports.setdefault(kind, []).append(blocks.report(labels))
            advance()
    return reports


def _print_answers(
    prompted: Any, weighted: Sequence[tuple[str, Any]], template: str, labels: Sequence[str], tokens: int, mix: Any
) -> None:
    """Print the continuation of each question, or the probability of each label, highest first.

    Each question is an example without its label, with the weights of the blocks.
    """
    before = template.partition("{label}")[0]
    space = before[len(before.rstrip()) :]  # part of the answer's first token
    answers = sorted(set(labels))
    for question, weight in weighted:
        print(question)
        shown = before.rstrip().replace("{text}", question)
        if tokens:
            print(prompted.generate(shown, tokens, weight, mix))
            continue
        probabilities = prompted.probabilities(shown, [space + answer for answer in answers], weight, mix).tolist()
        table = Table("answer", "probability")
        for probability, answer in sorted(zip(probabilities, answers, strict=True), reverse=True):
            table.add_row(answer, f"{probability:.3f}")
        terminal().print(table)


def _table(reports: dict[str, list[Any]]) -> Table:
    """A table of the reports, averaged over random draws."""
    table = Table("", *reports)
    for field in next(iter(reports.values()))[0]._fields:
        values = [[getattr(report, field) for report in drawn] for drawn in reports.values()]
        if values[0][0] is not None:
            table.add_row(field.replace("_", " "), *(f"{sum(drawn) / len(drawn):.3g}" for drawn in values))
    return table
