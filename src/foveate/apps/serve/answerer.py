# pyright: basic
"""Answers questions about documents from their cached keys and values, several questions together."""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple

from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor

from foveate.apps.serve.batch import Batch, Joining
from foveate.apps.serve.completion import Document, Message
from foveate.apps.serve.question_queue import PendingQuestion, Take
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkCache, ChunkEncoder
from foveate.transformers.documents import SEPARATOR, Passage, opened_image, split_documents
from foveate.transformers.index import ChunkIndex
from foveate.transformers.model import USER_TEXT, ReadDocument
from foveate.transformers.retrieval import choose

__all__ = ["Answerer"]

CACHED_PASSAGES = 64
"""Number of passages of requests whose chunks stay cached."""
CHARACTERS = 16
"""Largest number of characters for each token of the model's context; texts with more are refused unread."""


class _Prepared(NamedTuple):
    """What a question reads.

    Attributes:
        names: Names of the passages.
        chunks: Loads or encodes the passages.
        prompt: Token ids after the passages.
        tokens: Number of tokens before the answer.
        new_tokens: Largest number of tokens in the answer.
    """

    names: list[str]
    chunks: Callable[[], list[ChunkCache]]
    prompt: Int[Tensor, "_"]
    tokens: int
    new_tokens: int


class Answerer:
    """Answers questions in batches, from indexes that other processes may change. Several threads may call it.

    Args:
        encoder: Model, tokenizer and prefix; the prefix begins with the text of `chat_frame` before a message.
        indexes: Indexes by name, built with this encoder.
        method: Recompute policy.
        prompt: Template of a user's message, with {question} in it.
        chat: Whether to use the tokenizer's chat template; None uses it if there is one.
        passage_tokens: Largest number of tokens in a passage of a document that comes with a request. 0 keeps
            documents whole; None is 512, or a quarter of the model's context if that is less.
        max_new_tokens: Largest number of tokens in an answer; requests for more get this many.
        batch: Largest number of questions that a thread answers together.
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
        batch: int,
    ) -> None:
        self.encoder, self.indexes, self.method = encoder, dict(indexes), method
        self.max_new_tokens, self.batch = max_new_tokens, batch
        self._prompt = prompt
        self._passage_tokens = encoder.passage_tokens if passage_tokens is None else passage_tokens
        self._refreshing = Lock()
        self._chat = bool(encoder.tokenizer.chat_template) if chat is None else chat
        self._pictures: dict[tuple[str, ...], ChunkCache] = {}
        self._encode = lru_cache(CACHED_PASSAGES)(lambda ids: encoder.encode([ids])[0])

    @property
    def sizes(self) -> dict[str, int]:
        """Number of passages of each index."""
        return {name: len(index.passages) for name, index in self.indexes.items()}

    def prepare(self, question: PendingQuestion) -> None:
        """Tokenize the messages, and choose and tokenize the passages.

        Raises:
            ValueError: If the request is bad.
            CancelledError: If nobody waits for the answer any more.
        """
        asked, longest = question.asked, self.encoder.max_tokens
        if asked.characters > CHARACTERS * longest:
            raise ValueError(
                f"documents and messages have {asked.characters} characters, but the model takes {longest} tokens, "
                f"at most {CHARACTERS * longest} characters: send fewer documents"
            )
        new_tokens = min(asked.max_completion_tokens or asked.max_tokens or self.max_new_tokens, self.max_new_tokens)
        prompt = self.encoder.tokens(self.encoder.fill(*self._after(asked.messages)))
        seen = [self._picture(question, i + 1, url) for i, url in enumerate(asked.images)]
        pictures, own = [f"image {i + 1}" for i in range(len(seen))], partial(self._seen, question, seen)
        used = len(self.encoder.prefix) + len(prompt) + sum(len(each.ids) for each in seen)
        if not asked.documents:
            index = self._index(asked.index)
            numbers = choose(index, asked.messages[-1].content, used + new_tokens)
            names = [index.passages[number].name for number in numbers]
            tokens = used + sum(len(index.ids[number]) for number in numbers)
            loaded = partial(index.load, numbers)
            question.prepared = _Prepared([*names, *pictures], lambda: loaded() + own(), prompt, tokens, new_tokens)
            return
        if asked.index:
            raise ValueError("pass documents, or the name of an index, not both")
        passages = self._split(question, asked.documents)
        ids = [tuple(self.encoder.tokens(passage.text).tolist()) for passage in passages]
        tokens = used + sum(map(len, ids))
        self.encoder.check_length(
            tokens + new_tokens, "documents, messages and answer", "send fewer documents, or ask for less"
        )
        names, encoded = [passage.name for passage in passages], partial(self._encoded, question, ids)
        question.prepared = _Prepared([*names, *pictures], lambda: encoded() + own(), prompt, tokens, new_tokens)

    def answer(self, take: Take) -> None:
        """Answer prepared questions until none waits; sets each one's outcome or error.

        Those that wait join the others between tokens.

        Args:
            take: Takes a waiting question.
        """
        batch, taken = Batch(self.encoder, self.method), list[PendingQuestion]()

        def more() -> bool:
            while len(batch.unfinished) + len(taken) < self.batch and (question := take(fits)):
                taken.append(question)
            return bool(taken)

        def fits(question: PendingQuestion) -> bool:
            together = [each.prepared for each in [*taken, question]]
            return batch.fits([(each.tokens, each.new_tokens) for each in together])

        while more() or batch.unfinished:
            asked = [*taken, *(answer.question for answer in batch.unfinished)]
            new, taken[:] = self._read(taken), ()
            try:
                self._join(batch, new)
                if batch.unfinished:
                    batch.generate(more)
            except Exception as error:
                for question in asked:
                    question.finish(error)
                batch.close()
        batch.close()

    def _join(self, batch: Batch, new: Sequence[Joining]) -> None:
        """Add answers to a batch. If they fail, the others go on."""
        try:
            batch.join(new)
        except Exception as error:
            for each in new:
                each.question.finish(error)
            batch.join(())

    def _read(self, questions: Sequence[PendingQuestion]) -> list[Joining]:
        """Load or encode the passages of questions. One that fails ends alone."""
        read: list[Joining] = []
        for question in questions:
            names, chunks, prompt, _, new_tokens = question.prepared
            try:
                read.append(Joining(question, names, self.encoder.compose(chunks()), prompt, new_tokens))
            except Exception as error:
                question.finish(error)
        return read

    def _encoded(self, question: PendingQuestion, passages: Sequence[tuple[int, ...]]) -> list[ChunkCache]:
        chunks: list[ChunkCache] = []
        for ids in passages:
            question.heartbeat()
            chunks.append(self._encode(ids))
        return chunks

    def _picture(self, question: PendingQuestion, number: int, url: str) -> ReadDocument:
        """An image of a request, prepared for the model. It is read after the passages, as a passage of its own."""
        question.heartbeat()
        if not self.encoder.takes_images:
            raise ValueError("this model reads no images: leave them out, or serve a vision-language model")
        try:
            content = b64decode(url.partition(",")[2], validate=True)
            return self.encoder.read([opened_image(content), SEPARATOR])
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error

    def _seen(self, question: PendingQuestion, images: Sequence[ReadDocument]) -> list[ChunkCache]:
        chunks: list[ChunkCache] = []
        for image in images:
            question.heartbeat()
            chunk = self._pictures.get(image.images) or self.encoder.encode_read([image])[0]
            self._pictures[image.images] = chunk
            chunks.append(chunk)
        for oldest in [*self._pictures][:-CACHED_PASSAGES]:
            self._pictures.pop(oldest, None)  # another thread may have been faster
        return chunks

    def _split(self, question: PendingQuestion, documents: Sequence[str | Document]) -> list[Passage]:
        """Passages of the documents of a request. The work ends when nobody waits for it."""
        texts = [Document(text=text) if isinstance(text, str) else text for text in documents]
        if blank := [i + 1 for i, document in enumerate(texts) if not document.text.strip()]:
            raise ValueError(f"document {blank[0]} is blank: leave it out")

        def spans(text: str) -> Sequence[tuple[int, int]]:
            question.heartbeat()
            return self.encoder.spans(text)

        named = {f"{i + 1}: {each.title}".rstrip(": "): each.text for i, each in enumerate(texts)}
        return split_documents(named, self._passage_tokens, spans)

    def _index(self, name: str | None) -> ChunkIndex:
        names = [*self.indexes]
        name = names[0] if name is None and len(names) == 1 else name
        if name is None or name not in self.indexes:
            raise ValueError(f"pass documents, or the name of an index; there are these: {', '.join(names) or 'none'}")
        with self._refreshing:
            if self.indexes[name].changed:  # by another process
                self.indexes[name] = self.indexes[name].refresh()
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
