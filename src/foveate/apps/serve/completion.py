# pyright: basic
"""Chat completion requests, as OpenAI's clients send them, and their answers."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from foveate.apps.serve.request_model import Neutral, RequestModel

__all__ = ["Completion", "Document", "Message", "Outcome"]

MOST_DOCUMENTS = MOST_MESSAGES = 256
MAX_TEXT = 2**20


def _joined(content: Any) -> Any:
    """The text of a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('a part of the content must be {"type": "text", "text": TEXT}: only texts are supported')
    return "\n".join(part["text"] for part in content)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Content = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class Message(RequestModel):
    """A message of the conversation. Its content is a text, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Content, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, str]])]
    name: str | None = None

    neutral: ClassVar[Neutral] = {
        "annotations": [[]],
        "audio": [],
        "function_call": [],
        "refusal": [],
        "tool_calls": [[]],
    }


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
