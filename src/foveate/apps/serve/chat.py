# pyright: basic
"""Answers about documents over HTTP, as OpenAI's chat completions."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram

from foveate.apps.serve.answerer import Answerer
from foveate.apps.serve.completion import Completion, Outcome
from foveate.apps.serve.http import Health, create_app, until_gone
from foveate.apps.serve.question_queue import QuestionQueue

__all__ = ["chat_app", "local_chat_app"]

MAX_BODY = 2**22


def chat_app(
    answer: Callable[[Completion], AsyncGenerator[str | Outcome]],
    health: Health,
    ready: Health,
    model: str,
    *,
    key: str,
    timeout: float,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The chat service as an application for an ASGI server such as uvicorn.

    Args:
        answer: Answers a request piece by piece, then with its outcome. It raises a ValueError for a bad request.
        health: Fields of /health; see `create_app`.
        ready: Fields of /ready.
        model: Name of the model.
        key: API key of requests; empty for none.
        timeout: Deadline of a request in seconds.
        origins: Origins of web pages that may use the service.
    """
    registry = CollectorRegistry()
    tokens = Counter("foveate_tokens", "Tokens, by what became of them.", ["kind"], registry=registry)
    first_token = Histogram("foveate_first_token_seconds", "Seconds to the first words.", registry=registry)
    app, api = create_app(
        "Foveate: documents", model, key=key, max_body=MAX_BODY, timeout=timeout, registry=registry, health=health,
        ready=ready, origins=origins,
    )  # fmt: skip

    async def pieces(asked: Completion) -> AsyncGenerator[str | Outcome]:
        began, begun = time.perf_counter(), False
        try:
            async with aclosing(answer(asked)) as found:
                async for piece in found:
                    if not begun:
                        begun = True
                        first_token.observe(time.perf_counter() - began)
                    if isinstance(piece, Outcome):
                        for kind in ("prompt", "cached", "completion"):
                            tokens.labels(kind).inc(getattr(piece, kind))
                    yield piece
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    @api.post("/v1/chat/completions")
    async def _completions(asked: Completion, http: HTTPRequest) -> Any:
        """An answer to the last message from documents or an index, greedy unless temperature says otherwise."""
        if asked.model not in (None, model):
            raise HTTPException(404, f"the only model here is {model!r}")
        shared = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        found = pieces(asked)
        if asked.stream:
            first = await until_gone(http, anext(found))  # errors come before the stream begins
            return StreamingResponse(_events(asked, shared, first, found), media_type="text/event-stream")
        outcome = await until_gone(http, _last(found))
        message = {"role": "assistant", "content": outcome.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": outcome.finish, "logprobs": None}
        more = {"choices": [choice], "usage": outcome.usage, "passages": outcome.passages}
        return {**shared, "object": "chat.completion", **more}

    app.include_router(api)
    return app


def local_chat_app(
    answerer: Answerer, model: str, *, key: str, queue: int, timeout: float, origins: Sequence[str] = ()
) -> FastAPI:
    """The chat service with its model in this process, as an application for an ASGI server such as uvicorn.

    Args:
        answerer: Model, indexes and method.
        model: Name of the model.
        key: API key of requests; empty for none.
        queue: Largest number of waiting requests.
        timeout: Deadline of a request in seconds. Work that makes no step for so long is no longer healthy.
        origins: Origins of web pages that may use the service.
    """
    waiting = QuestionQueue(answerer.prepare, answerer.answer, answerer.batch, queue)

    async def health() -> dict[str, Any]:
        waiting.check(timeout)
        return {"busy": waiting.busy, "indexes": answerer.sizes}

    async def ready() -> dict[str, Any]:
        waiting.check_ready()
        return {"busy": waiting.busy}

    return chat_app(waiting.pieces, health, ready, model, key=key, timeout=timeout, origins=origins)


async def _last(found: AsyncGenerator[str | Outcome]) -> Any:
    """Last item of an asynchronous iterator."""
    async with aclosing(found):
        return [piece async for piece in found][-1]


async def _events(
    asked: Completion, shared: dict[str, Any], first: str | Outcome, found: AsyncGenerator[str | Outcome]
) -> AsyncGenerator[str]:
    """Chunks of an answer as server-sent events."""

    def event(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
        return f"data: {json.dumps({**shared, 'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n"

    async with aclosing(found):
        yield event({"role": "assistant", "content": ""})
        piece = first
        while isinstance(piece, str):
            yield event({"content": piece})
            piece = await anext(found)
        yield event({}, piece.finish, passages=piece.passages)
        if asked.stream_options and asked.stream_options.include_usage:
            yield event(None, usage=piece.usage)
        yield "data: [DONE]\n\n"
