"""The command that answers questions about a folder of documents."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foveate.cli.common import Device, Dtype, clear_errors, console, open_reader, options_of, progress, say_unknown
from foveate.methods import RECOMPUTE_POLICIES, recompute_policy_from_text
from foveate.utils.files import slug, write_whole

__all__ = ["rag"]


@clear_errors
def rag(
    folder: Annotated[Path, typer.Argument(help="Folder of .txt, .md, .rst files; subfolders count.")],
    questions: Annotated[
        list[str] | None, typer.Argument(help="What to ask. [dim]default: asks you, or reads lines from a pipe[/]")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Hub id or folder of a Llama, Qwen2, Qwen3 or Mistral model. Left out: the built-in reader, which "
            "knows a few hundred words."
        ),
    ] = "",
    method: Annotated[
        str, typer.Option(help=f"What is computed again for a question: {', '.join(RECOMPUTE_POLICIES)}.")
    ] = "infoflow_kv",
    recompute: Annotated[
        float | None, typer.Option(help="Fraction of the tokens to compute again, 0 to 1. [dim]default: 0.15[/]")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Any option of the method: -o norm=l1 -o reorder=true.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer by every method and by full prefill too, with times.")
    ] = False,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Documents are cut into passages of so many tokens at most, behind paragraphs or sentences if it "
            "is possible. 0: not at all. [dim]default: 512, or a quarter of the model's context[/]",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Take at most so many passages. Those that share most words with the question (BM25) come first; "
            "meaning plays no part. [dim]default: as many as the model's context holds[/]",
            show_default=False,
        ),
    ] = 0,
    prompt: Annotated[
        str,
        typer.Option(
            help="What stands behind the passages. [dim]default: 'Question: {question}', 'Answer:' on two lines[/]",
            show_default=False,
        ),
    ] = "Question: {question}\nAnswer:",
    prefix: Annotated[
        str, typer.Option(help="What stands in front of them, behind the start-of-text token or the chat's opening.")
    ] = "",
    chat: Annotated[
        bool | None,
        typer.Option(help="Put all of it into the tokenizer's chat template. [dim]default: if it has one[/]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    index: Annotated[
        Path | None,
        typer.Option(help="Folder of the cached passages. [dim]default: FOLDER/.foveate/ and the model's name[/]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("rag.html"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Ask questions about a folder of documents that the model reads only once (InfoFlow KV).

    Each passage is run through the model alone, and its keys and values are kept on disk. A question takes them from
    there; only the tokens that it attends to most are computed again. The page shows which.

    foveate rag notes --model Qwen/Qwen3-8B "Where was the keeper from?"

    foveate rag notes --model Qwen/Qwen3-8B --compare "Where was the keeper from?" "When was the lighthouse built?"

    foveate rag texts/facts < texts/questions.txt

    The last asks the built-in reader about texts in its words, which `foveate demo texts` writes.

    Passages that have not changed are not read again; a run that was stopped goes on where it was. An index belongs to
    one folder, model and --chunk: what they no longer ask for is removed from it. It takes much room: for each token
    128 KiB with a model like Llama-3.1-8B.
    """
    methods = _methods(method, recompute, options_of(option), compare)
    if "{question}" not in prompt:
        raise ValueError(f"--prompt says where the question goes, such as 'Q: {{question}} A:', not {prompt!r}")
    if out.suffix.lower() != ".html" or out.is_dir():
        raise ValueError(f"--out names the HTML page to write, not {out}: end it with .html")
    from foveate.transformers.documents import read_documents

    documents = read_documents(folder)
    language_model, tokenizer = open_reader(model, device, dtype)
    from foveate.transformers import ChunkEncoder
    from foveate.transformers.loading import frame
    from foveate.web.rag import ask, index_of, reply_page

    before, behind = frame(tokenizer, chat)
    encoder = ChunkEncoder(language_model, tokenizer, before + prefix)
    where = index or folder / ".foveate" / slug(Path(model).resolve().name if model else "built-in")
    chunks = index_of(where, encoder, documents, chunk)
    _build(chunks)
    say_unknown(model, tokenizer, "\n".join([*documents.values(), prompt.replace("{question}", "")]))
    settings = {
        "model": model or "the built-in reader",
        "method": repr(methods[method]),
        "documents": str(len(documents)),
        "passages": f"{len(chunks.passages)}, of {max(map(len, chunks.ids))} tokens at most",
        "prefix": before + prefix,
        "prompt": prompt + behind,
        "device": str(encoder.device),
        "dtype": str(encoder.dtype).removeprefix("torch."),
    }
    replies: list[Any] = []
    for question in _asked(questions):
        say_unknown(model, tokenizer, question)
        with progress() as track:
            advance = track("answering", len(methods) * (2 if compare else 1))
            reply = ask(
                chunks,
                question,
                methods,
                prompt=prompt + behind,
                top=top,
                max_new_tokens=max_new_tokens,
                advance=advance,
            )
        replies.append(reply)
        _say_refused(chunks)
        _print(reply, chunks)
        write_whole(out, reply_page(chunks, replies, settings).encode())
    if replies:
        console.print("open the page in a browser:")
        print(out.resolve())


def _methods(name: str, recompute: float | None, options: dict[str, str], compare: bool) -> dict[str, Any]:
    """The method, and all others at the same budget if they are compared."""
    chosen = options if recompute is None else {**options, "recompute": str(recompute)}
    methods = {name: recompute_policy_from_text(name, chosen)}
    budget = {"recompute": str(getattr(methods[name], "recompute", 0.15))}
    for other in RECOMPUTE_POLICIES if compare else ():
        methods[other] = methods.get(other) or recompute_policy_from_text(
            other, {} if other in ("none", "full") else budget
        )
    return methods


def _build(chunks: Any) -> None:
    """Compute what is missing, and say what was there."""
    with progress() as track:
        built = chunks.build(track)
    _say_refused(chunks)
    console.print(
        f"{len(chunks.passages)} passages, {sum(map(len, chunks.ids))} tokens: {built.encoded} read, {built.found} "
        f"found, {built.removed} removed; {chunks.nbytes / 2**20:.1f} MiB in {chunks.folder}"
    )


def _asked(questions: Sequence[str] | None) -> Iterator[str]:
    """The questions, or what is typed, or the lines of a pipe."""
    if questions:
        yield from questions
    elif sys.stdin.isatty():
        while question := console.input("question, or nothing to end: ").strip():
            yield question
    else:
        yield from filter(None, map(str.strip, sys.stdin))


def _print(reply: Any, chunks: Any) -> None:
    """The answer, where its time went, and where tokens were computed again."""
    from foveate.web.rag import STEPS
    from foveate.web.report import duration

    terminal, (first, *others) = Console(highlight=False), reply.answers
    print(f"{reply.question}\n{first.text.strip()}")
    table = Table("", *(answer.method for answer in reply.answers), box=SIMPLE, pad_edge=False)
    table.add_row(f"rows of {reply.spans[-1][1]}", *(str(len(answer.rows)) for answer in reply.answers))
    for step in STEPS:
        times = [answer.seconds.get(step) for answer in reply.answers]
        table.add_row(step, *("" if taken is None else duration(taken) for taken in times))
    table.add_row("first token", *(duration(answer.first_token) for answer in reply.answers))
    if others:
        table.add_row("KL", *(f"{answer.divergence:.2g}" for answer in reply.answers))
    terminal.print(table)
    for answer in others:
        print(f"{answer.method}: {answer.text.strip()}")
    places = Table("passage", "tokens", "computed again", box=SIMPLE, pad_edge=False)
    for passage, (start, stop) in zip(reply.passages, reply.spans, strict=True):
        again = int(((first.rows >= start) & (first.rows < stop)).sum())
        places.add_row(escape(chunks.passages[passage].name), str(stop - start), str(again))
    terminal.print(places)
    if left := len(chunks.passages) - len(reply.passages):
        console.print(f"{left} passages that share fewer words with the question were left out")


def _say_refused(chunks: Any) -> None:
    """Why files of the index were of no use."""
    for reason in chunks.refused:
        console.print(f"read again: {escape(reason)}", soft_wrap=True)
    chunks.refused.clear()
