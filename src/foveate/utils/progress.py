"""How long work says how far it is."""

from collections.abc import Callable

__all__ = ["Track", "silent"]

Track = Callable[[str, int], Callable[[], None]]
"""Given a name and a length, returns what is to be called after every step."""


def silent(name: str, length: int) -> Callable[[], None]:
    """Shows nothing."""
    return lambda: None
