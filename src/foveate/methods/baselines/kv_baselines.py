"""What InfoFlow KV is compared with: other choices of the rows to compute again, each from its description."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from foveate.methods.recompute_policy import ComposedCache, PartialRecompute, RecomputePolicy

__all__ = ["EPIC", "CacheBlend", "FullPrefill", "NoRecompute", "RandomRows"]


@dataclass(frozen=True, kw_only=True)
class FullPrefill(RecomputePolicy):
    """All rows: what the model computes without cached chunks."""

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """All of them."""
        return torch.arange(stale.spans[-1][1])


@dataclass(frozen=True, kw_only=True)
class NoRecompute(RecomputePolicy):
    """No rows: the chunks side by side, their keys turned to their places."""

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """None of them."""
        return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class RandomRows(PartialRecompute):
    """Rows drawn at random.

    Attributes:
        recompute: Fraction of all rows, prefix included, to compute again: 0 to 1.
        exclude_first: Leave out the prefix and the first chunk, which are as they should be.
        seed: Of the draw.
    """

    seed: int = 0

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """Each eligible row with equal chance."""
        generator = torch.Generator().manual_seed(self.seed)
        return self.select(torch.rand(stale.spans[-1][1], generator=generator), stale.spans)


@dataclass(frozen=True, kw_only=True)
class EPIC(PartialRecompute):
    """The first rows of every chunk, equally many of each (LegoLink of "EPIC", Hu et al. 2024, arXiv 2410.15332).

    The paper takes a fixed number of each chunk. This takes `recompute` of all rows, to compare at equal cost.
    """

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """The first row of every chunk, then the second, until there are enough."""
        starts = (0, *(start for start, _ in stale.spans[1:]))
        depths = [torch.arange(stop - start) for start, (_, stop) in zip(starts, stale.spans, strict=True)]
        return self.select(-torch.cat(depths).float(), stale.spans)


@dataclass(frozen=True, kw_only=True)
class CacheBlend(PartialRecompute):
    """The rows that change most in layer 1 when it is computed anew ("CacheBlend", Yao et al. 2024, arXiv 2405.16444).

    As InfoFlow's authors coded it: layer 0 is computed for all tokens, keys and values of layer 1 too, and stay so;
    deeper layers are computed again for the chosen rows alone. The paper chooses anew from layer to layer.

    Attributes:
        recompute: Fraction of all rows, prefix included, to compute again: 0 to 1.
        exclude_first: Leave out the prefix and the first chunk, which are as they should be.
        rank: Compare values ("v"), or keys ("k") as LMCache does.
    """

    exclude_first: bool = False
    rank: Literal["v", "k"] = "v"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank not in ("v", "k"):
            raise ValueError(f"rank must be v or k, not {self.rank!r}")

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """The rows that change most."""
        if not self.budget(stale.spans):
            return torch.empty(0, dtype=torch.long)
        return self.select(stale.kv_deviation(self.rank), stale.spans)
