"""`foveate rag serve`: answers about documents over HTTP."""

import gc
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from foveate.apps.cli.common import LanguageModel, Option, free_port, options_of
from foveate.apps.cli.rag import PROMPT, NewTokens, Policy, Prompt, Recompute, check_prompt, recompute_methods
from foveate.apps.cli.rag_index import Chat, Chunk, EightBit, MaxDisk, MaxMemory, Prefix, open_indexes
from foveate.apps.cli.serve import Host, MaxReplicas, Origins, Port, Replicas, Timeout, listen, scale_of
from foveate.apps.console import Device, Dtype, clear_errors, console

__all__ = ["serve"]


@clear_errors
def serve(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of documents, or indexes: folders or URLs. Requests name one by the last part of its path."
        ),
    ] = None,
    model: LanguageModel = "",
    method: Policy = "infoflow_kv",
    recompute: Recompute = None,
    option: Option = None,
    chunk: Chunk = None,
    eight_bit: EightBit = False,
    max_disk: MaxDisk = "",
    max_memory: MaxMemory = "0",
    prompt: Prompt = PROMPT,
    prefix: Prefix = "",
    chat: Chat = None,
    max_new_tokens: NewTokens = 64,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Largest batch of questions in a replica; each question holds a copy of its passages in memory.",
        ),
    ] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Longest queue; further requests get status 429.")] = 64,
    timeout: Timeout = 300.0,
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = 0,
    cors: Origins = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve answers about documents over HTTP, as OpenAI's chat completions, from cached passages (InfoFlow KV).

    foveate rag serve notes manuals --model Qwen/Qwen3-8B

    POST /v1/chat/completions takes messages, and an index by name or the documents themselves; it can stream. /docs
    describes it, /health and /metrics watch it. Indexes are the ones of `foveate rag`, and are built first. With
    --replicas, several processes answer, one per GPU if there are GPUs; if one dies, another takes over its requests.
    Needs `pip install 'foveate[transformers,serve]'`. Ctrl-C ends it.
    """
    from foveate.utils.device import choose_device

    check_prompt(prompt)
    policy = recompute_methods(method, recompute, options_of(option), compare=False)[method]
    gpu = choose_device(device).type == "cuda"
    scale = scale_of(replicas, max_replicas, kinds=1, gpus=gpu)
    import_module("fastapi" if scale == (1, 1) else "ray.serve")  # fails with what to install
    from foveate.apps.serve.answerer import Answerer
    from foveate.apps.serve.http import api_key

    key = api_key(host)
    names = [Path(folder).resolve().name for folder in folders or []]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two folders are called {twice[0]}, and requests choose by this name: rename one of them")
    port = free_port(host, port)

    def open_answerer(places: Sequence[str], device: str) -> Answerer:
        indexes, encoder, _, _ = open_indexes(
            places, model, "", chunk, eight_bit, max_disk, max_memory, prefix, chat, device, dtype
        )
        return Answerer(
            encoder, dict(zip(names, indexes, strict=True)), policy, prompt=prompt, chat=chat, passage_tokens=chunk,
            max_new_tokens=max_new_tokens, batch=batch,
        )  # fmt: skip

    answerer = open_answerer(folders or [], device)
    name = Path(model).name if model and Path(model).exists() else model or "built-in"
    console.print(f"serving {name} with {', '.join(names) or 'no index'}")
    if scale == (1, 1):
        from foveate.apps.serve.chat import local_chat_app

        app = local_chat_app(answerer, name, key=key, queue=queue, timeout=timeout, origins=cors or ())
        listen(app, host, port)
        return
    from foveate.apps.serve.chat import chat_app
    from foveate.apps.serve.chat_replicas import ChatFront, ChatReplica
    from foveate.apps.serve.replicas import running

    places = [str(index.place) for index in answerer.indexes.values()]
    import torch

    del answerer
    gc.collect()
    torch.cuda.empty_cache()  # a replica needs the memory of its model
    replica = {"open_answerer": partial(open_answerer, places, "cuda" if gpu else device), "timeout": timeout}
    started = running(ChatReplica, {"chat": replica}, batch=batch, queue=queue, replicas=scale, gpu=gpu)
    with started as handles:
        front = ChatFront(handles["chat"], "chat", names)
        app = chat_app(front.pieces, front.health, front.health, name, key=key, timeout=timeout, origins=cors or ())
        listen(app, host, port)
