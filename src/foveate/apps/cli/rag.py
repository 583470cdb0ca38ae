"""`foveate rag`: the commands about folders of documents."""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from typer.core import TyperGroup

from foveate.apps.cli import rag_index
from foveate.apps.cli.common import Embed, LanguageModel, Option, check_file, options_of, warn_unknown_words
from foveate.apps.cli.rag_index import (
    Chat,
    Chunk,
    EightBit,
    Force,
    Index,
    MaxDisk,
    MaxMemory,
    Prefix,
    Source,
    open_indexes,
    print_refused,
)
from foveate.apps.console import Device, Dtype, clear_errors, console, progress, terminal
from foveate.utils.files import write_whole

__all__ = ["PROMPT", "NewTokens", "Policy", "Prompt", "Recompute", "app", "check_prompt", "recompute_methods"]

PROMPT = "Question: {question}\nAnswer:"

Policy = Annotated[
    str,
    typer.Option(help="Method to choose the tokens to recompute: infoflow_kv, epic, cacheblend, random, none, full."),
]
Recompute = Annotated[
    float | None, typer.Option(help="Fraction of the tokens to recompute, 0 to 1. [dim]default: 0.15[/]")
]
Prompt = Annotated[
    str,
    typer.Option(
        help="Text after the passages. [dim]default: 'Question: {question}' and 'Answer:' on two lines[/]",
        show_default=False,
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Largest number of tokens in an answer.")]


class _AskByDefault(TyperGroup):
    """A command group with the default command `ask`, so that `foveate rag notes "Who?"` works."""

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


for command in (rag_index.index, rag_index.add, rag_index.remove, rag_index.info):
    app.command(command.__name__)(command)


@app.command("ask")
@clear_errors
def rag(
    folder: Source,
    questions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Questions, each with known right answers after tabs. [dim]default: typed at a prompt, "
            "or read as lines from a pipe[/]"
        ),
    ] = None,
    model: LanguageModel = "",
    method: Policy = "infoflow_kv",
    recompute: Recompute = None,
    option: Option = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer with every method and with full prefill, and compare times.")
    ] = False,
    chunk: Chunk = None,
    top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest number of passages. Passages that share no word with the question (BM25) are never read. "
            "[dim]default: as many as fit into the model's context[/]",
            show_default=False,
        ),
    ] = 0,
    embed: Embed = "",
    prompt: Prompt = PROMPT,
    prefix: Prefix = "",
    chat: Chat = None,
    max_new_tokens: NewTokens = 64,
    index: Index = "",
    eight_bit: EightBit = False,
    max_disk: MaxDisk = "",
    max_memory: MaxMemory = "0",
    force: Force = False,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("rag.html"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Answer questions about a folder of documents that the model encodes only once (InfoFlow KV).

    Each passage runs through the model separately, and its keys and values are kept on disk. A question loads them and
    recomputes only the tokens that it attends to most. The page shows which. The model may be a Llama, Qwen, Mistral,
    Mixtral, Phi-3, Gemma 3, GPT-OSS, OLMo, SmolLM3, Granite, GLM-4 or Cohere's; Qwen-VL, Gemma 3, SmolVLM, Idefics3
    and LLaVA-OneVision also read pictures.

    foveate rag notes --model Qwen/Qwen3-8B "Where was the keeper from?"

    foveate rag notes --model Qwen/Qwen3-8B --compare "Where was the keeper from?" "When was the lighthouse built?"

    foveate rag notes --model Qwen/Qwen3-8B -o norm=l1 -o reorder=true "Where was the keeper from?"

    torchrun --nproc-per-node 4 -m foveate rag notes --model Qwen/Qwen3-8B "Where was the keeper from?"

    With torchrun, each GPU keeps and computes a part of the context: the first token comes sooner, and longer contexts
    fit.

    foveate rag texts/facts --compare < texts/questions.txt

    The last command asks the built-in reader about texts of `foveate demo texts`. Several questions end with a table
    of the methods: how many of the known answers are right (the answer contains one, word for word), mean divergence
    from the full prefill, and median time.

    Unchanged passages are never encoded again, and an interrupted run resumes. An index belongs to one folder and
    model, and another model is refused; its unused files are removed. It is large: 128 KiB for each token with a model
    like Llama-3.1-8B.
    """
    methods = recompute_methods(method, recompute, options_of(option), compare)
    check_prompt(prompt)
    check_file(out, "an HTML page", ".html")
    if embed:
        import_module("sentence_transformers")  # fails early if packages are missing
    from foveate.apps.web.rag import reply_page
    from foveate.transformers.rag import ask, runs

    (chunks,), encoder, before, after = open_indexes(
        [folder], model, index, chunk, eight_bit, max_disk, max_memory, prefix, chat, device, dtype, force,
        divided=True,
    )  # fmt: skip
    unknown = encoder.tokenizer.unk_token_id
    texts = [passage.text for passage, ids in zip(chunks.passages, chunks.ids, strict=True) if unknown in ids]
    warn_unknown_words(model, encoder.tokenizer, "\n".join([*texts, prompt.replace("{question}", "")]))
    settings = {
        "model": model or "the built-in reader",
        "method": repr(methods[method]),
        "prefix": before,
        "prompt": prompt + after,
    }
    request: Any = {"prompt": prompt + after, "embed": embed, "top": top, "max_new_tokens": max_new_tokens}
    replies: list[Any] = []
    for lines in _shared(_lines(questions)):
        asked, earlier = _questions(lines), len(replies)
        warn_unknown_words(model, encoder.tokenizer, "\n".join(question for question, *_ in asked))
        try:
            with progress() as track:
                advance = track("answering", len(asked) * runs(methods))
                for question, *right in asked:
                    reply = ask(chunks, question, methods, **request, advance=advance)
                    replies.append(reply._replace(right=tuple(right)))
        finally:  # keep the answers from before an error or Ctrl-C
            print_refused(chunks)
            if (new := replies[earlier:]) and not console.quiet:  # one of several processes prints
                _print_replies(new, chunks)
                _write_page(out, reply_page(chunks, replies, settings))


def _write_page(out: Path, page: str) -> None:
    try:
        write_whole(out, page.encode())
    except OSError as error:  # the answers are printed already
        console.print(f"cannot write the page {out}: {error.strerror}")
    else:
        console.print("open the page in a browser:")
        print(out.resolve())


def check_prompt(prompt: str) -> None:
    """Raise a ValueError if the text after the passages has no place for the question."""
    if "{question}" not in prompt:
        raise ValueError(f"--prompt must contain {{question}}, such as 'Q: {{question}} A:', not {prompt!r}")


def recompute_methods(name: str, recompute: float | None, options: dict[str, str], compare: bool) -> dict[str, Any]:
    """Methods by name: the named one, and with `compare` all others at the same budget."""
    from foveate.methods import RECOMPUTE_POLICIES, recompute_policy_from_text

    chosen = options if recompute is None else {**options, "recompute": str(recompute)}
    methods = {name: recompute_policy_from_text(name, chosen)}
    budget = {"recompute": str(getattr(methods[name], "recompute", 0.15))}
    for other in RECOMPUTE_POLICIES if compare else ():
        methods[other] = methods.get(other) or recompute_policy_from_text(
            other, {} if other in ("none", "full") else budget
        )
    return methods


def _shared(lines: Iterator[list[str]]) -> Iterator[list[str]]:
    """The lines that the first of several processes reads."""
    if "LOCAL_RANK" not in os.environ:
        yield from lines
        return
    from accelerate.utils import broadcast_object_list

    while (read := broadcast_object_list([None if console.quiet else next(lines, None)])[0]) is not None:
        yield read


def _lines(questions: Sequence[str] | None) -> Iterator[list[str]]:
    """Lines from arguments or a pipe, else lines typed at a prompt, one at a time."""
    if questions:
        yield list(questions)
    elif sys.stdin.isatty():
        while line := console.input("question (empty to quit): ").strip():
            yield [line]
    else:
        try:
            lines = [line for line in sys.stdin if line.strip()]
            "".join(lines).encode()  # some terminals let wrong bytes pass
        except UnicodeError:
            raise ValueError("the questions are not UTF-8 text: save them as UTF-8") from None
        if lines:
            yield lines


def _questions(lines: Sequence[str]) -> list[list[str]]:
    """Question of each line, and its right answers after tabs."""
    asked = [[part.strip() for part in line.split("\t")] for line in lines]
    for number, (question, *_) in enumerate(asked, 1):
        if not question:
            raise ValueError(f"question {number} is empty: write a question, and its right answers after tabs")
    return [list(filter(None, parts)) for parts in asked]


def _print_replies(replies: Sequence[Any], chunks: Any) -> None:
    """Print questions and answers, then the details of a single question or a table over several."""
    from foveate.apps.web.rag import summary_cells

    for reply in replies:
        first = reply.answers[0]
        print(f"{reply.question}\n{first.text.strip()}")
        if reply.right and not reply.is_right(first):
            print(f"right answer: {' or '.join(reply.right)}")
    if len(replies) == 1:
        _print_details(replies[0], chunks)
        return
    (_, *columns), *rows = summary_cells(replies)
    table = _table(f"{len(replies)} questions", *columns)
    for row in rows:
        table.add_row(*row)
    terminal().print(table)


def _print_details(reply: Any, chunks: Any) -> None:
    """Print the time of each step, the answers of the other methods, and the recomputed tokens in each passage."""
    from foveate.apps.web.report import duration
    from foveate.transformers.rag import STEPS

    first, *others = reply.answers
    table = _table("", *(answer.method for answer in reply.answers))
    table.add_row(f"rows of {reply.spans[-1][1]}", *(str(len(answer.rows)) for answer in reply.answers))
    for step in STEPS:
        times = [answer.seconds.get(step) for answer in reply.answers]
        table.add_row(step, *("" if taken is None else duration(taken) for taken in times))
    table.add_row("first token", *(duration(answer.first_token) for answer in reply.answers))
    if others:
        table.add_row("KL", *(f"{answer.divergence:.2g}" for answer in reply.answers))
    terminal().print(table)
    for answer in others:
        print(f"{answer.method}: {answer.text.strip()}")
    places = _table("passage", "tokens", "recomputed")
    for passage, (start, stop) in zip(reply.passages, reply.spans, strict=True):
        count = int(((first.rows >= start) & (first.rows < stop)).sum())
        places.add_row(chunks.passages[passage].name, str(stop - start), str(count))
    terminal().print(places)
    if left := len(chunks.passages) - len(reply.passages):
        console.print(f"left out {left} passages that share fewer words with the question, or none")


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE, pad_edge=False, collapse_padding=True)
