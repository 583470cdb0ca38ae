"""Validation of options that take one of several values."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

__all__ = ["check_choice", "check_choices"]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Check that a value is one of the values of a Literal type.

    Raises:
        ValueError: If it is not; the message lists the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(choices)))}, not {value!r}")


def check_choices(options: Any) -> None:
    """`check_choice` for every field of a dataclass whose type is a Literal."""
    for field in fields(options):
        if get_origin(field.type) is Literal:
            check_choice(field.name, getattr(options, field.name), field.type)
