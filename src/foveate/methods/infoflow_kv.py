"""InfoFlow KV: recompute the cached tokens through which information reaches the answer (arXiv 2603.05353).

The chunks of a long context were computed separately, each from position 0. Put together, their keys have the wrong
positions, and no chunk has attended to another.

1. Keys are rotated to their positions in the whole context; values stay.
2. The score of a context token is the attention that it receives from the prompt over this stale cache.
3. The tokens with the highest scores run through all layers again, under the causal mask over the whole cache, and
   overwrite their rows.

With `reorder`, chunks are first sorted by their fraction of high-scoring tokens: the richest comes last, next to the
prompt.

A token that matters only because of an earlier chunk looks unimportant in the stale cache. `boundary`, which is not in
the paper, addresses that: the first tokens of every chunk, which lack most context, are recomputed before all others.
"""

import re
from dataclasses import dataclass, replace
from math import ceil, floor

from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.recompute_policy import ComposedCache, Geometry, Norm, PartialRecompute, Spans

__all__ = ["InfoFlowKV"]


@dataclass(frozen=True, kw_only=True)
class InfoFlowKV(PartialRecompute):
    """Recompute the rows that the prompt attends to most. `recompute=1.0` is exactly the full prefill.

    Attributes:
        recompute: Fraction of all rows, prefix included, to recompute: 0 to 1. The paper's tables use 0.15.
        scoring_layers: Layers that score: a band of relative depths such as "55%-78%", or layer numbers. The authors'
            code uses layers 22 to 25 of models with 32 and 40 layers: 69 to 78 % and 55 to 63 % of the depth.
        norm: How the attention a of the prompt's tokens to a row adds up: "l2" as in the authors' code, "l1", the
            sum, as in eq. 7 of the paper, or "entropy", the sum of -a log a, as in the authors' code for images.
        geometry: Positions of the chunks during scoring: "global" as in the context, or, to compare with the paper,
            "hl-hp", "hl-tp" or "tl-tp"; see `foveate.methods.recompute_policy.places`.
        reorder: Move high-scoring chunks to the end, next to the prompt. For chunks that are not one continuous text.
        exclude_first: Never recompute the prefix and the first chunk: their cache is exact. The authors' code
            recomputes them with `reorder`.
        boundary: Rows at the start of each chunk except the first that are recomputed before all others. A number
            below 1 is the share of the budget that they take, rounded down to the same number of rows in each chunk; a
            whole number from 1 on is the number of rows in each chunk. Highest scores come first. 0 is the paper's
            method.

    Examples:
        >>> InfoFlowKV().layers(32)
        (17, 18, 19, 20, 21, 22, 23, 24)
        >>> InfoFlowKV(scoring_layers=(22, 23, 24, 25)).layers(40)
        (22, 23, 24, 25)

    Raises:
        ValueError: If an option is out of its range.

    Source: arXiv 2603.05353.
    """

    scoring_layers: str | tuple[int, ...] = "55%-78%"
    norm: Norm = "l2"
    geometry: Geometry = "global"
    reorder: bool = False
    boundary: float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scoring_layers, str):
            _band(self.scoring_layers)
        elif not isinstance(self.scoring_layers, tuple) or not all(isinstance(i, int) for i in self.scoring_layers):
            raise ValueError(
                f'scoring_layers is a band such as "55%-78%", or numbers such as (22, 23), not {self.scoring_layers!r}'
            )
        if not (0 <= self.boundary < 1 or (self.boundary >= 1 and float(self.boundary).is_integer())):
            raise ValueError(
                "boundary is a share of the recomputed rows, from 0 to below 1, or a whole number of rows of each "
                f"chunk, not {self.boundary}"
            )

    def layers(self, number: int) -> tuple[int, ...]:
        """Scoring layers of a model with `number` layers.

        Raises:
            ValueError: If the model lacks one of the layers.
        """
        if isinstance(self.scoring_layers, str):
            low, high = _band(self.scoring_layers)
            return tuple(range(floor(low * number / 100), ceil(high * number / 100)))
        if not self.scoring_layers or not all(0 <= layer < number for layer in self.scoring_layers):
            raise ValueError(f"scoring_layers must be some of 0 to {number - 1}, not {self.scoring_layers}")
        return self.scoring_layers

    def arrange(self, stale: ComposedCache) -> tuple[int, ...]:
        """Order of the chunks; with `reorder`, ascending by their fraction of selected rows.

        As in the authors' code, all chunks, the first included, are scored at the positions where they were computed.
        """
        if not (self.reorder and self.recompute):
            return super().arrange(stale)
        scores = stale.received(self.layers(stale.layers), self.norm, "hl-tp")
        rows = replace(self, exclude_first=False, boundary=0).select(scores, stale.spans)
        hits = [int(((rows >= start) & (rows < stop)).sum()) / (stop - start) for start, stop in stale.spans]
        return tuple(sorted(range(len(hits)), key=lambda chunk: hits[chunk]))

    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Attention that each row receives from the prompt."""
        return stale.received(self.layers(stale.layers), self.norm, self.geometry)

    def select(self, scores: Float[Tensor, "context"], spans: Spans) -> Int[Tensor, "rows"]:
        """Rows with the highest scores, ascending; rows of `boundary` are taken before all others."""
        if not (first := self._first_rows(spans)):
            return super().select(scores, spans)
        rank = scores.argsort(stable=True, descending=True).argsort().neg().float()
        for start, stop in spans[1:]:
            rank[start : min(start + first, stop)] += len(rank)
        return super().select(rank, spans)

    def _first_rows(self, spans: Spans) -> int:
        """Number of rows at the start of each chunk except the first that come before all others."""
        if self.boundary >= 1:
            return int(self.boundary)
        return floor(self.boundary * self.budget(spans) / max(1, len(spans) - 1))


def _band(text: str) -> tuple[int, int]:
    """The two percentages of "55%-78%"."""
    numbers = re.fullmatch(r"\s*(\d+)\s*%\s*-\s*(\d+)\s*%\s*", text)
    low, high = map(int, numbers.groups()) if numbers else (0, 0)
    if not low < high <= 100:
        raise ValueError(f'scoring_layers is a band of depths such as "55%-78%", or layer numbers, not {text!r}')
    return low, high
