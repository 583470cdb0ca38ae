"""Validation of the options of a dataclass by the types of its fields."""

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["check_choice", "check_names", "check_options", "suggestion"]

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "None"}


def check_choice(name: str, value: object, choices: Any) -> None:
    """Check that a value is one of the values of a Literal type.

    Raises:
        ValueError: If it is not; the message lists the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(choices)))}, not {value!r}")


def check_options(options: Any) -> None:
    """Check that every field of a dataclass has a value of its type; a list may stand for a tuple.

    Raises:
        ValueError: If one has not.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if get_origin(field.type) is Literal:
            check_choice(field.name, value, field.type)
        elif not _accepts(field.type, value):
            raise ValueError(f"{field.name} must be {_words(field.type)}, not {value!r}")


def check_names(cls: Any, names: Iterable[str]) -> None:
    """Check that a dataclass has fields of these names.

    Raises:
        ValueError: If it lacks one; the message lists the fields and suggests the most similar.
    """
    known = [field.name for field in fields(cls)]
    for name in names:
        if name not in known:
            raise ValueError(
                f"{cls.__name__} has no option {name!r}{suggestion(name, known)}: "
                f"choose from {', '.join(known) or 'none'}"
            )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Text such as " (did you mean centre?)"; empty if no known name is similar."""
    close = get_close_matches(name.lower(), list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _accepts(kind: Any, value: object) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_accepts(one, value) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind) and not isinstance(value, bool)
    if origin is tuple:  # its length and its numbers are left to the class
        nested = get_origin(get_args(kind)[0]) is tuple
        return isinstance(value, tuple | list) and (nested or all(_accepts(float, item) for item in value))
    if kind in (int, float):  # True is an int
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, get_args(kind)))
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is tuple and get_origin(get_args(kind)[0]) is tuple:
        return 'a schedule, ((0.0, "dense"), (0.2, value))'
    return "numbers in parentheses, such as (4, 4)" if origin is tuple else WORDS.get(kind, str(kind))
