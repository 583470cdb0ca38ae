"""Requests as OpenAI's clients send them, with fields that ask for nothing."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, model_validator

__all__ = ["Neutral", "RequestModel"]

Neutral = Mapping[str, Collection[Any]]
"""Values besides null, by field, that ask for nothing."""


class RequestModel(BaseModel, extra="forbid"):
    """A request whose unknown fields are refused, unless they ask for nothing: null, or a neutral value."""

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields.keys() | cls.neutral.keys()
        return {
            name: value
            for name, value in given.items()
            if name not in known or not (value is None or value in cls.neutral.get(name, ()))
        }
