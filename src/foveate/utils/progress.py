"""Progress callbacks of long-running functions."""

from collections.abc import Callable

__all__ = ["Track", "silent"]

Track = Callable[[str, int], Callable[[], None]]
"""Called with a name and a number of steps; returns a function to call after each step."""


def silent(name: str, length: int) -> Callable[[], None]:
    """A `Track` that shows nothing."""
    return lambda: None
