"""InfoFlow KV: recompute the cached tokens through which information reaches the answer (arXiv 2603.05353).

Chunks of a long context were computed apart, each from position 0. Side by side their keys stand in the wrong places,
and no chunk has seen another.

1. Keys are turned to where they stand in the whole context; values stay.
2. A context token's score is the attention that it receives from the prompt, over this stale cache.
3. The tokens of the highest scores run through all layers again, under the true causal mask over the whole cache, and
   overwrite their rows.

With `reorder`, chunks are first ranked by how many of their tokens score high: the richest comes next to the prompt.

A token that matters only because of what stood before it, in another chunk, looks unimportant in the stale cache.
`boundary` is our own answer to that: the first tokens of every chunk, which lost most, come before all others.
"""

import re
from dataclasses import dataclass, replace
from math import ceil, floor

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.recompute_policy import ComposedCache, Geometry, Norm, PartialRecompute, Spans, check_choice

__all__ = ["InfoFlowKV"]


@dataclass(frozen=True, kw_only=True)
class InfoFlowKV(PartialRecompute):
    """Recompute the rows that the prompt attends to most. `recompute=1.0` is exactly the full prefill.

    Attributes:
        recompute: Fraction of all rows, prefix included, to compute again: 0 to 1. The paper's tables are at 0.15.
        scoring_layers: A band of depths, "55%-78%", or layer numbers. The release scores with layers 22 to 25, of
            models of 32 and of 40 layers: 69 to 78 % and 55 to 63 % of the depth.
        norm: Of a token's attention over the prompt: "l2" as released, or "l1", the sum, as in the paper's eq. 7.
        geometry: Where chunks stand while they are scored: at their places in the context ("global"); or, to compare
            with the paper, all from the beginning with the prompt behind the longest ("hl-hp") or behind them all
            ("hl-tp"), or all right before the prompt ("tl-tp").
        reorder: Move chunks that score high to the end, next to the prompt. For chunks that are no continuous text.
        exclude_first: Leave out the prefix and the first chunk, which are as they should be. The release does not
            with `reorder`.
        boundary: So many rows at the beginning of every chunk but the first come before all others, the best scored
            of them if the budget is small. 0 is the paper's method.

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
    boundary: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scoring_layers, str):
            _band(self.scoring_layers)
        elif not isinstance(self.scoring_layers, tuple) or not all(isinstance(i, int) for i in self.scoring_layers):
            raise ValueError(
                f'scoring_layers is a band such as "55%-78%", or numbers such as (22, 23), not {self.scoring_layers!r}'
            )
        if not isinstance(self.boundary, int) or self.boundary < 0:
            raise ValueError(f"boundary is a number of rows of each chunk, 0 or more, not {self.boundary}")
        check_choice("norm", self.norm, Norm)
        check_choice("geometry", self.geometry, Geometry)

    def layers(self, number: int) -> tuple[int, ...]:
        """The scoring layers of a model of so many layers.

        Raises:
            ValueError: If `scoring_layers` is neither a band nor layers that the model has.
        """
        if isinstance(self.scoring_layers, str):
            low, high = _band(self.scoring_layers)
            return tuple(range(floor(low * number / 100), ceil(high * number / 100)))
        if not self.scoring_layers or not all(0 <= layer < number for layer in self.scoring_layers):
            raise ValueError(f"scoring_layers must be some of 0 to {number - 1}, not {self.scoring_layers}")
        return self.scoring_layers

    def arrange(self, stale: ComposedCache) -> tuple[int, ...]:
        """The order of the chunks, with `reorder` by the fraction of their rows that would be selected.

        As released: chunks are scored as they were computed, all from the beginning, and the first one too.
        """
        if not (self.reorder and self.recompute):
            return super().arrange(stale)
        scores = stale.received(self.layers(stale.layers), self.norm, "hl-tp")
        rows = replace(self, exclude_first=False, boundary=0).select(scores, stale.spans)
        hits = [int(((rows >= start) & (rows < stop)).sum()) / (stop - start) for start, stop in stale.spans]
        return tuple(sorted(range(len(hits)), key=lambda chunk: hits[chunk]))

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """The rows that receive most attention from the prompt."""
        if not self.budget(stale.spans):
            return torch.empty(0, dtype=torch.long)
        return self.select(stale.received(self.layers(stale.layers), self.norm, self.geometry), stale.spans)

    def select(self, scores: Float[Tensor, "context"], spans: Spans) -> Int[Tensor, "rows"]:
        """The rows of the highest scores, ascending, those of `boundary` before all others."""
        if not self.boundary:
            return super().select(scores, spans)
        rank = scores.argsort(stable=True, descending=True).argsort().neg().float()
        for start, stop in spans[1:]:
            rank[start : min(start + self.boundary, stop)] += len(rank)
        return super().select(rank, spans)


def _band(text: str) -> tuple[int, int]:
    """The two percentages of "55%-78%"."""
    numbers = re.fullmatch(r"\s*(\d+)\s*%\s*-\s*(\d+)\s*%\s*", text)
    low, high = map(int, numbers.groups()) if numbers else (0, 0)
    if not low < high <= 100:
        raise ValueError(f'scoring_layers is a band of depths such as "55%-78%", or layer numbers, not {text!r}')
    return low, high
