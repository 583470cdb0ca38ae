"""`foveate rag serve`: answers about documents over HTTP."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.common import Device, Dtype, clear_errors, console, open_reader, options_of, progress
from foveate.cli.serve import Host, Port, Timeout, print_address
from foveate.methods import RECOMPUTE_POLICIES, recompute_policy_from_text

__all__ = ["serve"]


@clear_errors
def serve(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of documents; each is an index that requests name by the folder's name."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Hub id or folder of a language model. [dim]default: the built-in reader[/]")
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
    chunk: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Largest number of tokens in a passage; 0 keeps documents whole. [dim]default: 512, or a quarter of "
            "the model's context if that is less[/]",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            help="Text of a user's message. [dim]default: 'Question: {question}' and 'Answer:' on two lines[/]",
            show_default=False,
        ),
    ] = "Question: {question}\nAnswer:",
    prefix: Annotated[
        str, typer.Option(help="Text before the passages, after the start-of-text token or the chat's opening.")
    ] = "",
    chat: Annotated[
        bool | None, typer.Option(help="Use the tokenizer's chat template. [dim]default: if it has one[/]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in an answer.")] = 64,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Answers at a time.")] = 4,
    queue: Annotated[int, typer.Option(min=0, help="Most requests that wait; beyond, they get status 429.")] = 64,
    timeout: Timeout = 300.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve answers about documents over HTTP, as OpenAI's chat completions, from cached passages (InfoFlow KV).

    foveate rag serve notes manuals --model Qwen/Qwen3-8B

    POST /v1/chat/completions takes messages, and an index by name or the documents themselves; it streams if asked to.
    /docs describes it, /health and /metrics watch it. Indexes are the ones of `foveate rag`, and are built first.
    Needs `pip install 'foveate[transformers,serve]'`. Ctrl-C ends it.
    """
    if "{question}" not in prompt:
        raise ValueError(f"--prompt must contain {{question}}, such as 'Q: {{question}} A:', not {prompt!r}")
    policy = recompute_policy_from_text(
        method, options_of(option) | ({} if recompute is None else {"recompute": str(recompute)})
    )
    import_module("fastapi")  # fails with what to install
    import uvicorn

    from foveate.serve.chat import Reader, chat_app
    from foveate.serve.http import api_key, free_port
    from foveate.transformers import ChunkEncoder
    from foveate.transformers.documents import read_documents
    from foveate.transformers.index import index_documents, index_name
    from foveate.transformers.model import chat_frame, check_config

    key, port = api_key(host), free_port(host, port)
    documents = {folder.resolve().name: (folder, read_documents(folder)) for folder in folders or []}
    if len(documents) < len(folders or []):
        raise ValueError("two folders have the same name, by which requests choose one: rename one")
    language_model, tokenizer = open_reader(model, device, dtype, check_config)
    before, _ = chat_frame(tokenizer, chat)
    encoder = ChunkEncoder(language_model, tokenizer, before + prefix)
    longest = min(512, language_model.config.max_position_embeddings // 4) if chunk is None else chunk
    indexes = {
        name: index_documents(folder / ".foveate" / index_name(model), encoder, texts, longest)
        for name, (folder, texts) in documents.items()
    }
    for index in indexes.values():
        with progress() as track:
            index.build(track)
    template = bool(tokenizer.chat_template) if chat is None else chat
    reader = Reader(
        encoder, indexes, policy, prompt=prompt, chat=template, passage_tokens=longest,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    name = Path(model).name if model and Path(model).exists() else model or "built-in"
    console.print(f"serving {name} with {', '.join(indexes) or 'no index'}")
    print_address(host, port)
    asgi = chat_app(reader, name, key=key, threads=threads, queue=queue, timeout=timeout)
    uvicorn.run(asgi, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
