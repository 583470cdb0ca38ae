# pyright: basic
"""Answers about documents from cached chunks: requests as OpenAI's chat completions, answered in batches."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jinja2 import TemplateError
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer, TopPLogitsWarper

from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkCache, ChunkEncoder, Context
from foveate.transformers.context import patch_batch
from foveate.transformers.documents import split_documents
from foveate.transformers.index import ChunkIndex
from foveate.transformers.model import USER_TEXT
from foveate.transformers.retrieval import choose

__all__ = ["Answerer", "Completion", "Message", "Outcome", "Question"]

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


class Question:
    """A request under way.

    Args:
        asked: What to answer.
        emit: Called with each piece of the answer's text.

    Attributes:
        outcome: The finished answer, or the error. Cancelling it ends the answer.
    """

    def __init__(self, asked: Completion, emit: Callable[[str], object] = lambda text: None) -> None:
        self.asked, self.emit = asked, emit
        self.outcome: Future[Outcome] = Future()

    def end(self, found: Outcome | Exception) -> None:
        """Set the outcome, unless nobody waits for it any more."""
        with suppress(InvalidStateError):
            if isinstance(found, Outcome):
                self.outcome.set_result(found)
            else:
                self.outcome.set_exception(found)


class _Reading(NamedTuple):
    """A question, the passages to read for it, and the prompt after them."""

    question: Question
    names: list[str]
    context: Context
    prompt: Tensor
    new_tokens: int


class Answerer:
    """Answers questions, any number of them in one forward pass and one loop. Several threads may call it.

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

    def answer(self, questions: Sequence[Question]) -> None:
        """Answer questions together. Each ends with its outcome or its error; a ValueError is the client's fault."""
        readings = []
        for question in questions:
            try:
                readings.append(self._reading(question))
            except Exception as error:
                question.end(error)
        for together in self._fitting(readings):
            try:
                self._generate(together)
            except Exception as error:
                for reading in together:
                    reading.question.end(error)

    def _fitting(self, readings: Sequence[_Reading]) -> list[list[_Reading]]:
        """Readings in batches whose longest text, followed by the longest answer, fits into the model's context."""
        batches: list[list[_Reading]] = []
        for reading in readings:
            batch = [*batches[-1], reading] if batches else [reading]
            tokens = max(len(each.context) + len(each.prompt) for each in batch)
            tokens += max(each.new_tokens for each in batch)
            if batches and tokens <= self.encoder.model.config.max_position_embeddings:
                batches[-1] = batch
            else:
                batches.append([reading])
        return batches

    def _reading(self, question: Question) -> _Reading:
        asked = question.asked
        new_tokens = asked.max_completion_tokens or asked.max_tokens or self.max_new_tokens
        if new_tokens > self.max_new_tokens:
            raise ValueError(f"max_tokens={new_tokens} is more than the {self.max_new_tokens} that this service gives")
        prompt = self.encoder.tokens(self._text_after(asked.messages))
        names, chunks = self._read(asked, len(self.encoder.prefix) + len(prompt) + new_tokens)
        return _Reading(question, names, self.encoder.compose(chunks), prompt, new_tokens)

    def _generate(self, readings: Sequence[_Reading]) -> None:
        ends = self.encoder.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        texts = [_Text(self.encoder.tokenizer, each.question, each.new_tokens, ends) for each in readings]
        contexts, prompts = [each.context for each in readings], [each.prompt for each in readings]
        room = max(each.new_tokens for each in readings)
        batch = patch_batch(contexts, prompts, [self.method] * len(readings), room=room)
        try:
            samples = _Samples([each.question.asked for each in readings])
            batch.generate(max_new_tokens=room, logits_processor=[samples], stopping_criteria=[_Texts(texts)])
        finally:
            batch.close()
        for reading, text, rows in zip(readings, texts, batch.rows, strict=True):
            words = self.encoder.tokenizer.decode(text.ids, skip_special_tokens=True).lstrip()
            finish, read = "stop" if text.ids[-1] in ends else "length", len(reading.context)
            tokens = read + len(reading.prompt), read - len(rows), len(text.ids)
            reading.question.end(Outcome(reading.names, words, finish, *tokens))

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


class _Text(TextStreamer):
    """The text of an answer as it grows; words are emitted as they are complete.

    Attributes:
        ids: Tokens so far.
    """

    def __init__(self, tokenizer: Any, question: Question, most: int, ends: Sequence[int | None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._question, self._most, self._ends, self._begun = question, most, ends, False
        self.ids: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether no more tokens follow, or nobody waits for them."""
        return self._question.outcome.cancelled() or self.ids[-1] in self._ends or len(self.ids) == self._most

    def add(self, token: int) -> bool:
        """Take the next token, unless the text is complete already. Returns whether it is now."""
        if not (self.ids and self.complete):
            self.ids.append(token)
            self.put(torch.tensor([token]))
            if self.complete:
                self.end()
        return self.complete

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self._begun else text.lstrip()
        if text:
            self._begun = True
            self._question.emit(text)


class _Texts(StoppingCriteria):
    """Gives each text of a batch its next token, and ends those that are complete."""

    def __init__(self, texts: Sequence[_Text]) -> None:
        self._texts = texts

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        complete = [text.add(token) for text, token in zip(self._texts, tokens, strict=True)]
        return torch.tensor(complete, device=input_ids.device)


class _Samples(LogitsProcessor):
    """Samples of the answers of a batch whose temperature is not 0; the largest logit of the others stays it."""

    def __init__(self, asked: Sequence[Completion]) -> None:
        self._samples = [
            _Sample(each.temperature, each.top_p, each.seed) if each.temperature else None for each in asked
        ]

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        rows = zip(self._samples, scores[:, None], strict=True)
        return torch.cat([sample(input_ids, row) if sample else row for sample, row in rows])


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
