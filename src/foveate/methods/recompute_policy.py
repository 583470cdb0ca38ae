"""Interface of policies that choose which rows of a composed KV cache to recompute."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import floor
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foveate.utils.choices import check_options

__all__ = [
    "ComposedCache",
    "FixedRows",
    "Geometry",
    "Norm",
    "PartialRecompute",
    "RecomputePolicy",
    "Spans",
    "places",
]

Norm = Literal["l2", "l1", "entropy"]
Geometry = Literal["global", "hl-hp", "tl-tp", "hl-tp"]
Spans = tuple[tuple[int, int], ...]


def places(geometry: Geometry, spans: Spans) -> tuple[Int[Tensor, "rows"], int]:
    """Position of each row during scoring, and position of the first prompt token. The prefix keeps its positions.

    Args:
        geometry: "global": chunks one after the other. "hl-hp": all chunks start after the prefix, and the prompt
            follows the longest. "hl-tp": the same chunks, but the prompt position of "global". "tl-tp": all chunks
            end right before the prompt position of "global".
        spans: Row ranges of the chunks; see `ComposedCache.spans`.

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
    """A prompt and the KV cache before it, composed of chunks that were computed separately. Rows count from 0."""

    @property
    def spans(self) -> Spans:
        """(first row, last row + 1) of each chunk. Rows before the first chunk are the prefix."""
        ...

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        ...

    def received(self, layers: tuple[int, ...], norm: Norm, geometry: Geometry) -> Float[Tensor, "context"]:
        """Attention that each row receives from the prompt, averaged over these layers."""
        ...

    def kv_deviation(self, rank: Literal["v", "k"]) -> Float[Tensor, "context"]:
        """Mean squared change of each row's values ("v") or keys ("k") in layer 1 when recomputed.

        Overwrites all rows of layers 0 and 1.
        """
        ...


class RecomputePolicy(ABC):
    """A policy that chooses the rows to recompute."""

    def arrange(self, stale: ComposedCache) -> tuple[int, ...]:
        """Order of the chunks before recomputation; unchanged by default."""
        return tuple(range(len(stale.spans)))

    @abstractmethod
    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """Rows to recompute, ascending."""


@dataclass(frozen=True, eq=False)
class FixedRows(RecomputePolicy):
    """Recompute given rows, whatever the prompt.

    Attributes:
        numbers: Row numbers, ascending.
    """

    numbers: Int[Tensor, "rows"]

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """The given rows."""
        return self.numbers


@dataclass(frozen=True, kw_only=True)
class PartialRecompute(RecomputePolicy):
    """A policy that recomputes a fixed fraction of the rows with the highest scores.

    Attributes:
        recompute: Fraction of all rows, prefix included, to recompute: 0 to 1. Above 0, at least one row.
        exclude_first: Never recompute the prefix and the first chunk: their cache is exact.
    """

    recompute: float = 0.15
    exclude_first: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.recompute <= 1:
            raise ValueError(
                f"recompute is the fraction of rows to recompute, 0 to 1, not {self.recompute}; 15 % is 0.15"
            )

    @abstractmethod
    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Score of each row."""

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """Rows with the highest scores, ascending. A budget of 0 computes no scores."""
        if not self.budget(stale.spans):
            return torch.empty(0, dtype=torch.long)
        return self.select(self.scores(stale), stale.spans)

    def eligible(self, spans: Spans) -> Bool[Tensor, "context"]:
        """Mask of the selectable rows."""
        rows = torch.ones(spans[-1][1], dtype=torch.bool)
        rows[: spans[0][1] if self.exclude_first else 0] = False
        return rows

    def budget(self, spans: Spans) -> int:
        """Number of rows to choose."""
        wanted = max(1, floor(self.recompute * spans[-1][1] + 1e-9)) if self.recompute else 0
        return min(wanted, int(self.eligible(spans).sum()))

    def select(self, scores: Float[Tensor, "context"], spans: Spans) -> Int[Tensor, "rows"]:
        """Rows with the highest scores, ascending. Ties go to the first rows.

        Args:
            scores: Score of each row.
            spans: Row ranges of the chunks; see `ComposedCache.spans`.
        """
        eligible = self.eligible(spans).to(scores.device)
        best = scores.masked_fill(~eligible, -torch.inf).sort(descending=True, stable=True).indices
        return best[: self.budget(spans)].sort().values
