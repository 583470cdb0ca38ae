# pyright: basic
"""Answers questions about documents from their cached keys and values, several questions in one batch."""

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

__all__ = ["Answerer", "Completion", "Message", "Outcome", "PendingQuestion"]

MOST_DOCUMENTS = MOST_MESSAGES = 256
MAX_TEXT = 2**20
CACHED_PASSAGES = 64
"""Number of passages of requests whose chunks stay cached."""

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
    """Options of a streamed response."""

    include_usage: bool = False


class Completion(BaseModel, extra="forbid"):
    """A chat completion request; unknown fields are refused."""

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
        passages: Names of the passages in the context.
        text: The answer.
        finish: Finish reason: "stop" or "length".
        prompt: Number of tokens before the answer.
        cached: Number of prompt tokens from the cache.
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


class PendingQuestion:
    """A request that is being answered.

    Args:
        asked: The request.
        emit: Called with each new piece of the answer, for streaming.

    Attributes:
        outcome: Future of the answer or the error. Cancel it to stop generation.
    """

    def __init__(self, asked: Completion, emit: Callable[[str], object] = lambda text: None) -> None:
        self.asked, self.emit = asked, emit
        self.outcome: Future[Outcome] = Future()

    def finish(self, found: Outcome | Exception) -> None:
        """Set the outcome, unless the question was cancelled."""
        with suppress(InvalidStateError):
            if isinstance(found, Outcome):
                self.outcome.set_result(found)
            else:
                self.outcome.set_exception(found)


class _Prepared(NamedTuple):
    """A question with its passages and the prompt that follows them."""

    question: PendingQuestion
    names: list[str]
    context: Context
    prompt: Tensor
    new_tokens: int


class Answerer:
    """Answers questions in batches. Several threads may call it.

    Args:
        encoder: Model, tokenizer and prefix; the prefix begins with the text of `chat_frame` before a message.
        indexes: Indexes by name, built with this encoder.
        method: Recompute policy.
        prompt: Template of a user's message, with {question} in it.
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

    @property
    def sizes(self) -> dict[str, int]:
        """Number of passages of each index."""
        return {name: len(index.passages) for name, index in self.indexes.items()}

    def answer(self, questions: Sequence[PendingQuestion]) -> None:
        """Answer questions together; sets each one's outcome or error. A ValueError means a bad request."""
        prepared = []
        for question in questions:
            try:
                prepared.append(self._prepare(question))
            except Exception as error:
                question.finish(error)
        for group in self._grouped(prepared):
            try:
                self._generate(group)
            except Exception as error:
                for each in group:
                    each.question.finish(error)

    def _grouped(self, questions: Sequence[_Prepared]) -> list[list[_Prepared]]:
        """Consecutive questions that can share a batch: the longest text plus the longest answer fits the context.

        A model without an end token answers one question at a time: `generate` could not pad answers that end early.
        """
        longest = self.encoder.model.config.max_position_embeddings
        if self.encoder.model.generation_config.eos_token_id is None:
            return [[one] for one in questions]
        groups: list[list[_Prepared]] = []
        for one in questions:
            group = [*groups[-1], one] if groups else [one]
            tokens = max(len(each.context) + len(each.prompt) for each in group)
            if groups and tokens + max(each.new_tokens for each in group) <= longest:
                groups[-1] = group
            else:
                groups.append([one])
        return groups

    def _prepare(self, question: PendingQuestion) -> _Prepared:
        asked = question.asked
        new_tokens = asked.max_completion_tokens or asked.max_tokens or self.max_new_tokens
        if new_tokens > self.max_new_tokens:
            raise ValueError(f"max_tokens={new_tokens} is more than the limit of this service, {self.max_new_tokens}")
        prompt = self.encoder.tokens(self.encoder.fill(*self._after(asked.messages)))
        names, chunks = self._read(asked, len(self.encoder.prefix) + len(prompt) + new_tokens)
        return _Prepared(question, names, self.encoder.compose(chunks), prompt, new_tokens)

    def _generate(self, group: Sequence[_Prepared]) -> None:
        ends = self.encoder.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        answers = [_Answer(self.encoder.tokenizer, each.question, each.new_tokens, ends) for each in group]
        contexts, prompts = [each.context for each in group], [each.prompt for each in group]
        longest = max(each.new_tokens for each in group)
        batch = patch_batch(contexts, prompts, [self.method] * len(group), room=longest)
        try:
            sample, stop = _SampleEach([each.question.asked for each in group]), _StopEach(answers)
            batch.generate(max_new_tokens=longest, logits_processor=[sample], stopping_criteria=[stop])
        finally:
            batch.close()
        for each, answer, rows in zip(group, answers, batch.rows, strict=True):
            text = self.encoder.tokenizer.decode(answer.ids, skip_special_tokens=True).lstrip()
            finish, read = "stop" if answer.ids[-1] in ends else "length", len(each.context)
            tokens = read + len(each.prompt), read - len(rows), len(answer.ids)
            each.question.finish(Outcome(each.names, text, finish, *tokens))

    def _read(self, asked: Completion, used: int) -> tuple[list[str], list[ChunkCache]]:
        """Names and chunks of the passages; with `used` more tokens they fit into the model's context."""
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
            self.encoder.spans,
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

    def _after(self, messages: Sequence[Message]) -> tuple[str, dict[str, str]]:
        """Template of the conversation after the passages, and the text of each message by its place in the template.

        The passages stand at the start of the first message. System instructions come after them too, so that all
        conversations share their chunks. No message passes through the chat template, so that none can open a turn.
        """
        texts = {f"<<message {i}>>": message.content for i, message in enumerate(messages)}
        placed = [*zip((message.role for message in messages), texts, strict=True)]
        system = [place for role, place in placed if role in ("system", "developer")]
        turns = [(role, place) for role, place in placed if role in ("user", "assistant")]
        if len(turns) % 2 == 0 or any(role != ("user", "assistant")[i % 2] for i, (role, _) in enumerate(turns)):
            raise ValueError("messages of user and assistant must alternate, and begin and end with the user's")
        parts = [self._prompt.replace("{question}", place) if role == "user" else place for role, place in turns]
        parts[0] = "\n\n".join([*system, parts[0]])
        if not self._chat:
            return "".join(f" {part}\n" if i % 2 else part for i, part in enumerate(parts)), texts
        parts[0] = USER_TEXT + parts[0]
        try:
            whole = self.encoder.tokenizer.apply_chat_template(
                [{"role": role, "content": part} for (role, _), part in zip(turns, parts, strict=True)],
                tokenize=False, add_generation_prompt=True, enable_thinking=False,
            )  # fmt: skip
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return whole.partition(USER_TEXT)[2], texts


class _Answer(TextStreamer):
    """An answer during generation. Each word is emitted as soon as it is complete.

    Attributes:
        ids: Token ids so far.
    """

    def __init__(self, tokenizer: Any, question: PendingQuestion, most: int, ends: Sequence[int | None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._question, self._most, self._ends, self._begun = question, most, ends, False
        self.ids: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the answer has its end token or largest length, or the question was cancelled."""
        return self._question.outcome.cancelled() or self.ids[-1] in self._ends or len(self.ids) == self._most

    def add(self, token: int) -> bool:
        """Append a token unless the answer has ended; returns whether it has ended."""
        if not (self.ids and self.ended):
            self.ids.append(token)
            self.put(torch.tensor([token]))
            if self.ended:
                self.end()
        return self.ended

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self._begun else text.lstrip()
        if text:
            self._begun = True
            self._question.emit(text)


class _StopEach(StoppingCriteria):
    """Appends the new token of each row to its answer, and stops rows with finished answers."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        ended = [answer.add(token) for answer, token in zip(self._answers, tokens, strict=True)]
        return torch.tensor(ended, device=input_ids.device)


class _SampleEach(LogitsProcessor):
    """Samples each row with its request's options; rows with temperature 0 stay greedy."""

    def __init__(self, asked: Sequence[Completion]) -> None:
        self._samples = [
            _Sample(each.temperature, each.top_p, each.seed) if each.temperature else None for each in asked
        ]

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        rows = zip(self._samples, scores[:, None], strict=True)
        return torch.cat([sample(input_ids, row) if sample else row for sample, row in rows])


class _Sample(LogitsProcessor):
    """Samples by the Gumbel-max trick, with a random generator for one request only."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, TopPLogitsWarper(top_p)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbelow(2**63) if seed is None else seed)

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = self._top_p(input_ids, scores.float() / self._temperature)
        noise = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp_min(1e-300)
        return scores - (-noise.log()).log().to(scores)
