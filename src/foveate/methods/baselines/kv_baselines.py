"""Baselines of InfoFlow KV: other policies that choose the rows of a composed cache to recompute."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.recompute_policy import ComposedCache, PartialRecompute, RecomputePolicy

__all__ = ["EPIC", "CacheBlend", "FullPrefill", "NoRecompute", "ProphetKV", "RandomRows"]


@dataclass(frozen=True, kw_only=True)
class FullPrefill(RecomputePolicy):
    """All rows: the full prefill, without cached chunks."""

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """All rows."""
        return torch.arange(stale.spans[-1][1])


@dataclass(frozen=True, kw_only=True)
class NoRecompute(RecomputePolicy):
    """No rows: cached chunks one after the other, with keys rotated to their positions."""

    def rows(self, stale: ComposedCache) -> Int[Tensor, "rows"]:
        """No rows."""
        return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class RandomRows(PartialRecompute):
    """Random rows.

    Attributes:
        seed: Seed of the random scores.
    """

    seed: int = 0

    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Random numbers, so that each eligible row is chosen with equal probability."""
        return torch.rand(stale.spans[-1][1], generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True, kw_only=True)
class EPIC(PartialRecompute):
    """The first rows of every chunk (LegoLink of "EPIC", Hu et al. 2024, arXiv 2410.15332).

    The paper takes a fixed number of rows of each chunk; this takes the fraction `recompute` of all rows, to compare
    at equal cost.
    """

    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Highest for the first row of every chunk, then for the second, and so on."""
        starts = (0, *(start for start, _ in stale.spans[1:]))
        depths = [torch.arange(stop - start) for start, (_, stop) in zip(starts, stale.spans, strict=True)]
        return -torch.cat(depths).float()


@dataclass(frozen=True, kw_only=True)
class CacheBlend(PartialRecompute):
    """The rows whose layer-1 cache changes most when recomputed ("CacheBlend", Yao et al. 2024, arXiv 2405.16444).

    Follows the code of InfoFlow's authors: layer 0 and the keys and values of layer 1 are recomputed for all rows and
    kept; deeper layers are recomputed for the chosen rows only. The paper chooses again at every layer.

    Attributes:
        rank: Compare values ("v"), or keys ("k") as LMCache does.
    """

    exclude_first: bool = False
    rank: Literal["v", "k"] = "v"

    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Change of each row when it is recomputed."""
        return stale.kv_deviation(self.rank)


@dataclass(frozen=True, kw_only=True)
class ProphetKV(PartialRecompute):
    """The rows that the prompt attends to most in all layers ("ProphetKV", Wang et al. 2026, arXiv 2602.02579).

    Its first stage runs the prompt over the stale cache. The score of a row is the attention that it receives,
    averaged over heads, summed over the tokens of the prompt, and averaged over all layers. Its second stage
    recomputes the rows with the highest scores. Written from the paper's abstract and from descriptions by others;
    neither the paper's text nor its code was available. The paper recomputes 20 % of the rows.

    It is `InfoFlowKV(norm="l1", scoring_layers="0%-100%")` by another name.
    """

    def scores(self, stale: ComposedCache) -> Float[Tensor, "context"]:
        """Attention that each row receives from the prompt."""
        return stale.received(tuple(range(stale.layers)), "l1", "global")
