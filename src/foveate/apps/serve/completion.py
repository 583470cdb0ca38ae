# pyright: basic
"""Chat completion requests, as OpenAI's clients send them, and their answers."""

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from foveate.apps.serve.request_model import Neutral, RequestModel

__all__ = ["Completion", "Document", "Message", "Outcome"]

MOST_DOCUMENTS = MOST_MESSAGES = 256
MOST_IMAGES = 16
MAX_TEXT = 2**20
DATA_URL = r"^data:image/[a-z+.-]+;base64,"


def _url(part: Any) -> str:
    """URL of an image part; empty for a text part.

    Raises:
        ValueError: If the part is neither, or its image is not in the URL itself.
    """
    kind, value = (part.get("type"), part.get(part.get("type"))) if isinstance(part, dict) else (None, None)
    if kind == "text" and isinstance(value, str):
        return ""
    url = value.get("url") if kind == "image_url" and isinstance(value, dict) else None
    if not isinstance(url, str):
        raise ValueError(
            'a part of the content must be {"type": "text", "text": TEXT} or {"type": "image_url", "image_url": '
            '{"url": URL}}'
        )
    if not re.match(DATA_URL, url):
        raise ValueError(f"an image must be in the request, as data:image/png;base64,..., not at {url[:40]!r}")
    return url


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Content = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class Message(RequestModel):
    """A message of the conversation. Its content is a text, or a list of texts and, from the user, images.

    Attributes:
        images: Data URLs of the images.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Content, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})]
    name: str | None = None
    images: Annotated[tuple[Annotated[str, Field(pattern=DATA_URL)], ...], Field(max_length=MOST_IMAGES)] = ()

    neutral: ClassVar[Neutral] = {
        "annotations": [[]],
        "audio": [],
        "function_call": [],
        "refusal": [],
        "tool_calls": [[]],
    }

    @model_validator(mode="before")
    @classmethod
    def _take_apart(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("content"), list):
            return given
        parts = [(part, _url(part)) for part in given["content"]]
        if (images := [url for _, url in parts if url]) and given.get("role") != "user":
            raise ValueError(f"only messages of the user hold images, not those of {given.get('role')!r:.20}")
        return {**given, "content": "\n".join(part["text"] for part, url in parts if not url), "images": images}


class Document(BaseModel, extra="forbid"):
    """A document to read."""

    text: Content
    title: str = ""


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool = False

    neutral: ClassVar[Neutral] = {"include_obfuscation": [False]}


class Completion(RequestModel):
    """A chat completion request. Fields that ask for nothing are accepted; other unknown fields are refused."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    model: str | None = None
    documents: Annotated[list[Content | Document], Field(min_length=1, max_length=MOST_DOCUMENTS)] | None = None
    index: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=4),
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    ] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    user: str | None = None

    neutral: ClassVar[Neutral] = {
        "audio": [],
        "function_call": ["none"],
        "functions": [[]],
        "logit_bias": [{}],
        "logprobs": [False],
        "metadata": [{}],
        "modalities": [["text"]],
        "parallel_tool_calls": [False, True],
        "prediction": [],
        "reasoning_effort": ["none"],
        "response_format": [{"type": "text"}],
        "service_tier": ["auto", "default"],
        "store": [False],
        "tool_choice": ["auto", "none"],
        "tools": [[]],
        "top_logprobs": [0],
    }

    @property
    def images(self) -> list[str]:
        """Data URLs of all images of the conversation, in order."""
        return [url for message in self.messages for url in message.images]

    @property
    def characters(self) -> int:
        """Number of characters in the messages and the documents."""
        documents = (each if isinstance(each, str) else each.text for each in self.documents or ())
        return sum(map(len, documents)) + sum(len(message.content) for message in self.messages)


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
