# pyright: basic
"""Answers about documents over HTTP, as OpenAI's chat completions, from cached chunks."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import aclosing
from functools import lru_cache
from threading import Event
from typing import Annotated, Any, Literal, NamedTuple

import torch
from fastapi import FastAPI, HTTPException
from fastapi import Request as HTTPRequest
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic import BaseModel, Field
from transformers import LogitsProcessor, TextStreamer, TopPLogitsWarper

from foveate.methods.recompute_policy import RecomputePolicy
from foveate.serve.http import create_app, overloaded, until_gone
from foveate.transformers import ChunkCache, ChunkEncoder
from foveate.transformers.documents import split_documents
from foveate.transformers.index import ChunkIndex
from foveate.transformers.model import USER_TEXT
from foveate.transformers.retrieval import choose

__all__ = ["Answerer", "chat_app"]

MAX_BODY = 2**22
MOST_DOCUMENTS = MOST_MESSAGES = 256
MAX_TEXT = 2**20
CACHED_PASSAGES = 64
"""Passages of requests whose chunks are kept for the next request with them."""

Content = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class Message(BaseModel, extra="forbid"):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


class Document(BaseModel, extra="forbid"):
    """A document to read."""

    text: Content
    title: str = ""


class StreamOptions(BaseModel, extra="forbid"):
    """What a stream contains besides the answer."""

    include_usage: bool = False


class Completion(BaseModel, extra="forbid"):
    """A request. What is not here is not supported, and refused."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    documents: Annotated[list[Content | Document], Field(min_length=1, max_length=MOST_DOCUMENTS)] | None = None
    index: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    user: str | None = None


class Outcome(NamedTuple):
    """A finished answer.

    Attributes:
        passages: Names of the passages that were read.
        text: The answer.
        finish: Why it ends: "stop" or "length".
        prompt: Number of tokens before the answer.
        cached: Number of these that were not recomputed.
        completion: Number of tokens of the answer.
    """

    passages: list[str]
    text: str
    finish: str
    prompt: int
    cached: int
    completion: int

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, as OpenAI counts them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answerer:
    """Answers one question at a time in each thread that calls it.

    Args:
        encoder: Model, tokenizer and prefix; the prefix is what `chat_frame` puts before a message, and more.
        indexes: Indexes by name, built with this encoder.
        method: Method that chooses the rows to recompute.
        prompt: Text of a user's message, with {question} in it.
        chat: Whether to use the tokenizer's chat template; None uses it if there is one.
        passage_tokens: Largest number of tokens in a passage of a document that comes with a request. 0 keeps
            documents whole; None is 512, or a quarter of the model's context if that is less.
        max_new_tokens: Largest number of tokens in an answer.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        indexes: Mapping[str, ChunkIndex],
        method: RecomputePolicy,
        *,
        prompt: str,
        chat: bool | None,
        passage_tokens: int | None,
        max_new_tokens: int,
    ) -> None:
        self.encoder, self.indexes, self.method = encoder, indexes, method
        self.max_new_tokens = max_new_tokens
        self._prompt = prompt
        self._passage_tokens = encoder.passage_tokens if passage_tokens is None else passage_tokens
        self._chat = bool(encoder.tokenizer.chat_template) if chat is None else chat
        self._encode = lru_cache(CACHED_PASSAGES)(lambda ids: encoder.encode([ids])[0])

    def answer(self, asked: Completion, stop: Event, emit: Callable[[str], object] = lambda text: None) -> Outcome:
        """The answer; its text is emitted piece by piece as well.

        Args:
            asked: What to answer.
            stop: Set when the client has left.
            emit: Called with each piece of the text.

        Raises:
            ValueError: If it cannot be answered.
            CancelledError: If the client has left.
        """
        new_tokens = asked.max_completion_tokens or asked.max_tokens or self.max_new_tokens
        if new_tokens > self.max_new_tokens:
            raise ValueError(f"max_tokens={new_tokens} is more than the {self.max_new_tokens} that this service gives")
        prompt = self.encoder.tokens(self._text_after(asked.messages)).tolist()
        names, chunks = self._read(asked, len(self.encoder.prefix) + len(prompt) + new_tokens)
        context = self.encoder.compose(chunks)
        words = _Words(self.encoder.tokenizer, stop, emit)
        options: dict[str, Any] = {"streamer": words}
        if asked.temperature:
            options["logits_processor"] = [_Sample(asked.temperature, asked.top_p, asked.seed)]
        with context.patch(self.method, prompt) as patched:
            text = patched.generate(max_new_tokens=new_tokens, **options).lstrip()
            cached = len(context) - len(patched.rows)
        ends = self.encoder.model.generation_config.eos_token_id
        finish = "stop" if words.last in (ends if isinstance(ends, list) else [ends]) else "length"
        return Outcome(names, text, finish, len(context) + len(prompt), cached, words.count)

    def _read(self, asked: Completion, used: int) -> tuple[list[str], list[ChunkCache]]:
        """Names and chunks of the passages, which fit into the model's context beside `used` tokens."""
        if not asked.documents:
            index = self._index(asked.index)
            numbers = choose(index, asked.messages[-1].content, used)
            return [index.passages[number].name for number in numbers], index.load(numbers)
        if asked.index:
            raise ValueError("pass documents, or the name of an index, not both")
        texts = [text if isinstance(text, Document) else Document(text=text) for text in asked.documents]
        if blank := [i + 1 for i, document in enumerate(texts) if not document.text.strip()]:
            raise ValueError(f"document {blank[0]} is blank: leave it out")
        passages = split_documents(
            {f"{i + 1}: {document.title}".rstrip(": "): document.text for i, document in enumerate(texts)},
            self._passage_tokens,
            self.encoder.count,
        )
        ids = [tuple(self.encoder.tokens(passage.text).tolist()) for passage in passages]
        self.encoder.check_length(
            used + sum(map(len, ids)), "documents, messages and answer", "send fewer documents, or ask for less"
        )
        return [passage.name for passage in passages], [self._encode(each) for each in ids]

    def _index(self, name: str | None) -> ChunkIndex:
        names = [*self.indexes]
        name = names[0] if name is None and len(names) == 1 else name
        if name is None or name not in self.indexes:
            raise ValueError(f"pass documents, or the name of an index; there are these: {', '.join(names) or 'none'}")
        return self.indexes[name]

    def _text_after(self, messages: Sequence[Message]) -> str:
        """The conversation after the passages, which stand where its first message begins.

        Instructions of the system come after the passages too, so that their chunks serve all conversations.
        """
        system = [message.content for message in messages if message.role in ("system", "developer")]
        turns = [message for message in messages if message.role in ("user", "assistant")]
        if len(turns) % 2 == 0 or any(turn.role != ("user", "assistant")[i % 2] for i, turn in enumerate(turns)):
            raise ValueError("messages of user and assistant must alternate, and begin and end with the user's")
        texts = [self._prompt.replace("{question}", t.content) if t.role == "user" else t.content for t in turns]
        texts[0] = "\n\n".join([*system, texts[0]])
        if not self._chat:
            return "".join(f" {text}\n" if i % 2 else text for i, text in enumerate(texts))
        texts[0] = USER_TEXT + texts[0]
        try:
            whole = self.encoder.tokenizer.apply_chat_template(
                [{"role": turn.role, "content": text} for turn, text in zip(turns, texts, strict=True)],
                tokenize=False, add_generation_prompt=True, enable_thinking=False,
            )  # fmt: skip
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return whole.partition(USER_TEXT)[2]


class _Words(TextStreamer):
    """Emits the words of an answer as they are complete, and counts tokens. It ends the answer when `stop` is set."""

    def __init__(self, tokenizer: Any, stop: Event, emit: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop, self._emit, self._begun, self.count, self.last = stop, emit, False, 0, -1

    def put(self, value: torch.Tensor) -> None:
        if self._stop.is_set():
            raise CancelledError
        if not self.next_tokens_are_prompt:
            self.count, self.last = self.count + 1, int(value.flatten()[-1])
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self._begun else text.lstrip()
        if text:
            self._begun = True
            self._emit(text)


class _Sample(LogitsProcessor):
    """Noise by which the largest logit is a sample (Gumbel-max), from a generator that no other thread uses."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, TopPLogitsWarper(top_p)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbelow(2**63) if seed is None else seed)

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = self._top_p(input_ids, scores.float() / self._temperature)
        noise = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp_min(1e-300)
        return scores - (-noise.log()).log().to(scores)


class _Threads:
    """Threads behind a bounded queue."""

    def __init__(self, threads: int, queue: int) -> None:
        self._most, self.busy, self._pool = threads + queue, 0, ThreadPoolExecutor(threads)

    async def pieces(self, work: Callable[[Event, Callable[[str], object]], Outcome]) -> AsyncGenerator[str | Outcome]:
        """What `work` emits, then its result. It is told to stop when this generator is closed."""
        if self.busy >= self._most:
            raise overloaded()
        loop, stop, found = asyncio.get_running_loop(), Event(), asyncio.Queue[Any]()

        def finished() -> None:
            self.busy -= 1
            found.put_nowait(None)

        running = self._pool.submit(work, stop, lambda text: loop.call_soon_threadsafe(found.put_nowait, text))
        self.busy += 1
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(finished))
        try:
            while (piece := await found.get()) is not None:
                yield piece
            yield running.result()
        finally:
            stop.set()
            running.cancel()  # if it has not begun


def chat_app(answerer: Answerer, model: str, *, key: str, threads: int, queue: int, timeout: float) -> FastAPI:
    """The service as an ASGI application.

    Args:
        answerer: What answers.
        model: Name of the model.
        key: Key that requests must carry; empty for none.
        threads: Number of answers at a time.
        queue: Most requests that wait for a thread.
        timeout: Seconds after which a request is given up.
    """
    registry = CollectorRegistry()
    tokens = Counter("foveate_tokens", "Tokens, by what became of them.", ["kind"], registry=registry)
    first_token = Histogram("foveate_first_token_seconds", "Seconds to the first words.", registry=registry)
    workers = _Threads(threads, queue)

    async def health() -> dict[str, Any]:
        return {
            "busy": workers.busy,
            "indexes": {name: len(index.passages) for name, index in answerer.indexes.items()},
        }

    app, api = create_app(
        "Foveate: documents", model, key=key, max_body=MAX_BODY, timeout=timeout, registry=registry, health=health
    )

    async def pieces(asked: Completion) -> AsyncGenerator[str | Outcome]:
        began, begun = time.perf_counter(), False
        try:
            async with aclosing(workers.pieces(lambda stop, emit: answerer.answer(asked, stop, emit))) as found:
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


async def _last(found: AsyncGenerator[str | Outcome]) -> Any:
    """The last thing that is found."""
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
