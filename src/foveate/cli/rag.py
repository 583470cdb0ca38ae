"""`foveate rag`: the commands about folders of documents."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from foveate.cli.common import (
    Device,
    Dtype,
    check_file,
    clear_errors,
    console,
    open_reader,
    options_of,
    progress,
    warn_unknown_words,
)
from foveate.methods import RECOMPUTE_POLICIES, recompute_policy_from_text
from foveate.utils.files import write_whole

__all__ = ["app", "recompute_methods"]


class _AskByDefault(TyperGroup):
    """A group whose command `ask` takes what does not begin with the name of another: `foveate rag notes "Who?"`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else ["ask", *args])


app = typer.Typer(
    cls=_AskByDefault,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Answer questions about a folder of documents that the model encodes only once (InfoFlow KV).\n\n"
    "`foveate rag FOLDER` is short for `foveate rag ask FOLDER`.",
)


@app.command("ask")
@clear_errors
def rag(
    folder: Annotated[Path, typer.Argument(help="Folder of .txt, .md and .rst files, including its subfolders.")],
    questions: Annotated[
        list[str] | None,
        typer.Argument(help="Questions. [dim]default: typed at a prompt, or read as lines from a pipe[/]"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Hub id or folder of a Llama, Qwen, Mistral or Phi-3 model. [dim]default: the built-in reader, "
            "which knows a few hundred words[/]"
        ),
    ] = "",
    method: Annotated[
        str, typer.Option(help=f"Method that chooses the tokens to recompute: {', '.join(RECOMPUTE_POLICIES)}.")
    ] = "infoflow_kv",
    recompute: Annotated[
        float | None, typer.Option(help="Fraction of the tokens to recompute, 0 to 1. [dim]default: 0.15[/]")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the method: -o norm=l1 -o reorder=true.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer with every method and with full prefill, and compare times.")
    ] = False,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Largest number of tokens in a passage. Documents are split after paragraphs or sentences where "
            "possible. 0 keeps them whole. [dim]default: 512, or a quarter of the model's context if that is less[/]",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest number of passages. Those that share most words with the question (BM25) are used; meaning "
            "plays no part. [dim]default: as many as fit into the model's context[/]",
            show_default=False,
        ),
    ] = 0,
    prompt: Annotated[
        str,
        typer.Option(
            help="Text after the passages. [dim]default: 'Question: {question}' and 'Answer:' on two lines[/]",
            show_default=False,
        ),
    ] = "Question: {question}\nAnswer:",
    prefix: Annotated[
        str, typer.Option(help="Text before the passages, after the start-of-text token or the chat's opening.")
    ] = "",
    chat: Annotated[
        bool | None,
        typer.Option(help="Use the tokenizer's chat template. [dim]default: if it has one[/]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in an answer.")] = 64,
    index: Annotated[
        Path | None,
        typer.Option(help="Folder of the cached passages. [dim]default: FOLDER/.foveate/ and the model's name[/]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("rag.html"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Answer questions about a folder of documents that the model encodes only once (InfoFlow KV).

    Each passage runs through the model alone, and its keys and values are kept on disk. A question loads them, and
    recomputes only the tokens that it attends to most. The page shows which.

    foveate rag notes --model Qwen/Qwen3-8B "Where was the keeper from?"

    foveate rag notes --model Qwen/Qwen3-8B --compare "Where was the keeper from?" "When was the lighthouse built?"

    foveate rag texts/facts < texts/questions.txt

    The last asks the built-in reader about texts in its own words, which `foveate demo texts` writes.

    Unchanged passages are never encoded again, and an interrupted run continues where it stopped. An index belongs to
    one folder, model and --chunk; files that these no longer need are removed. It is large: 128 KiB for each token
    with a model like Llama-3.1-8B.
    """
    methods = recompute_methods(method, recompute, options_of(option), compare)
    if "{question}" not in prompt:
        raise ValueError(f"--prompt must contain {{question}}, such as 'Q: {{question}} A:', not {prompt!r}")
    check_file(out, "an HTML page", ".html")
    from foveate.transformers import ChunkEncoder
    from foveate.transformers.documents import read_documents
    from foveate.transformers.index import index_documents, index_name
    from foveate.transformers.model import chat_frame, check_config
    from foveate.transformers.rag import ask
    from foveate.web.rag import reply_page

    documents = read_documents(folder)
    language_model, tokenizer = open_reader(model, device, dtype, check_config)
    before, after = chat_frame(tokenizer, chat)
    encoder = ChunkEncoder(language_model, tokenizer, before + prefix)
    where = index or folder / ".foveate" / index_name(model)
    chunks = index_documents(where, encoder, documents, chunk)
    _build(chunks)
    warn_unknown_words(model, tokenizer, "\n".join([*documents.values(), prompt.replace("{question}", "")]))
    settings = {
        "model": model or "the built-in reader",
        "method": repr(methods[method]),
        "documents": str(len(documents)),
        "passages": f"{len(chunks.passages)}, of at most {max(map(len, chunks.ids))} tokens",
        "prefix": before + prefix,
        "prompt": prompt + after,
        "device": str(encoder.device),
        "dtype": str(encoder.dtype).removeprefix("torch."),
    }
    request: Any = {"prompt": prompt + after, "top": top, "max_new_tokens": max_new_tokens}
    replies: list[Any] = []
    for question in _questions(questions):
        warn_unknown_words(model, tokenizer, question)
        with progress() as track:
            advance = track("answering", len(methods) * (2 if compare else 1))
            replies.append(ask(chunks, question, methods, **request, advance=advance))
        _print_refused(chunks)
        _print_reply(replies[-1], chunks)
        write_whole(out, reply_page(chunks, replies, settings).encode())
    if replies:
        console.print("open the page in a browser:")
        print(out.resolve())


def recompute_methods(name: str, recompute: float | None, options: dict[str, str], compare: bool) -> dict[str, Any]:
    """The method, and with `compare` all others at the same budget."""
    chosen = options if recompute is None else {**options, "recompute": str(recompute)}
    methods = {name: recompute_policy_from_text(name, chosen)}
    budget = {"recompute": str(getattr(methods[name], "recompute", 0.15))}
    for other in RECOMPUTE_POLICIES if compare else ():
        methods[other] = methods.get(other) or recompute_policy_from_text(
            other, {} if other in ("none", "full") else budget
        )
    return methods


def _build(chunks: Any) -> None:
    with progress() as track:
        built = chunks.build(track)
    _print_refused(chunks)
    console.print(
        f"{len(chunks.passages)} passages, {sum(map(len, chunks.ids))} tokens: {built.encoded} encoded, "
        f"{built.found} found, {built.removed} removed; {chunks.nbytes / 2**20:.1f} MiB in {chunks.folder}"
    )


def _questions(questions: Sequence[str] | None) -> Iterator[str]:
    """The questions given as arguments, typed at a prompt, or read as lines from a pipe."""
    if questions:
        yield from questions
    elif sys.stdin.isatty():
        while question := console.input("question (empty to quit): ").strip():
            yield question
    else:
        yield from filter(None, map(str.strip, sys.stdin))


def _print_reply(reply: Any, chunks: Any) -> None:
    """Print the answers, the time of each step, and the number of recomputed tokens in each passage."""
    from foveate.transformers.rag import STEPS
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
    places = Table("passage", "tokens", "recomputed", box=SIMPLE, pad_edge=False)
    for passage, (start, stop) in zip(reply.passages, reply.spans, strict=True):
        count = int(((first.rows >= start) & (first.rows < stop)).sum())
        places.add_row(escape(chunks.passages[passage].name), str(stop - start), str(count))
    terminal.print(places)
    if left := len(chunks.passages) - len(reply.passages):
        console.print(f"left out {left} passages that share fewer words with the question")


def _print_refused(chunks: Any) -> None:
    """Print why files of the index could not be used, once."""
    for reason in chunks.refused:
        console.print(f"encoded again: {escape(reason)}", soft_wrap=True)
    chunks.refused.clear()
