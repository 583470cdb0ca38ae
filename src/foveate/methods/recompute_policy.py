"""What methods share that patch a composed KV cache: which of its rows are computed again."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import floor
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "ComposedCache",
    "Geometry",
    "Norm",
    "PartialRecompute",
    "RecomputePolicy",
    "Spans",
    "check_choice",
    "places",
]

Norm = Literal["l2", "l1"]
Geometry = Literal["global", "hl-hp", "tl-tp", "hl-tp"]
Spans = tuple[tuple[int, int], ...]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of a Literal's.

    Raises:
        ValueError: With the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def places(geometry: Geometry, spans: Spans) -> tuple[Int[Tensor, "rows"], int]:
    """Where each row stands while it is scored, and where the prompt begins. The prefix stays in front.

    Args:
        geometry: Chunks one behind the other ("global"); all from the beginning with the prompt behind the longest
            ("hl-hp") or behind as many tokens as there are ("hl-tp"); or all right before such a prompt ("tl-tp").
        spans: As of `ComposedCache`.

    Examples:
        >>> for geometry in ("global", "hl-hp", "tl-tp", "hl-tp"):
        ...     positions, prompt = places(geometry, ((1, 3), (3, 6)))
        ...     print(geometry, positions.tolist(), prompt)
        global [0, 1, 2, 3, 4, 5] 6
        hl-hp [0, 1, 2, 1, 2, 3] 4
        tl-tp [0, 4, 5, 3, 4, 5] 6
        hl-tp [0, 1, 2, 1, 2, 3] 6
    """
    prefix, end = spans[0][0], spans[-1][1]
    lengths = [stop - start for start, stop in spans]
    starts = {
        "global": [start for start, _ in spans],
        "tl-tp": [end - length for length in lengths],
    }.get(geometry, [prefix] * len(spans))
    chunks = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat([torch.arange(prefix), *chunks]), prefix + max(lengths) if geometry == "hl-hp" else end


@runtime_checkable
class ComposedCache(Protocol):
    """A prompt, and before it a cache composed of chunks that were computed apart. Rows are numbered from 0."""

    @property
    def spans(self) -> Spans:
        """First row of each chunk and the row behind its last. Rows before the first chunk are the prefix."""
        ...

    @property
    def layers(self) -> int:
        """How many the model has."""
        ...

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "context"]:
        """The attention that each row receives from the prompt, mean over these layers."""
        ...

    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "context"]:
        """Mean square change of each row's values ("v") or keys ("k") in layer 1 when computed anew.

        All rows of layers 0 and 1 are overwritten.
        """
        ...


class RecomputePolicy(ABC):
    """A choice of rows to compute again."""

    def arrange(self, stale: ComposedCache) -> tuple[int, ...]:
        """The order to put the chunks in first; as they are, unless a method says otherwise."""
        return tuple(range(len(stale.spans)))

    @abstractmethod
    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """The rows to compute again, ascending."""


@dataclass(frozen=True, kw_only=True)
class PartialRecompute(RecomputePolicy):
    """A choice of so many rows.

    Attributes:
        recompute: Fraction of all rows, prefix included, to compute again: 0 to 1. Above 0 it is one row at least.
        exclude_first: Leave out the prefix and the first chunk, which are as they should be.
    """

    recompute: float = 0.15
    exclude_first: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(
                f"recompute is the fraction of rows to compute again, 0 to 1, not {self.recompute}; 15 % is 0.15"
            )

    def eligible(self, spans: Spans) -> Bool[Tensor, "context"]:
        """Which rows may be chosen at all."""
        rows = torch.ones(spans[-1][1], dtype=torch.bool)
        rows[: spans[0][1] if self.exclude_first else 0] = False
        return rows

    def budget(self, spans: Spans) -> int:
        """How many rows are chosen."""
        wanted = max(1, floor(self.recompute * spans[-1][1] + 1e-9)) if self.recompute else 0
        return min(wanted, int(self.eligible(spans).sum()))

    def select(self, scores: Float[Tensor, "context"], spans: Spans) -> Int[Tensor, "rows"]:
        """The rows of the highest scores, ascending; among equals the first ones.

        Args:
            scores: One per row.
            spans: As of `ComposedCache`.
        """
        eligible = self.eligible(spans).to(scores.device)
        best = scores.masked_fill(~eligible, -torch.inf).sort(descending=True, stable=True).indices
        return best[: self.budget(spans)].sort().values
