"""Soft assignment of tokens to destinations: the merge and unmerge matrices of ToMA (arXiv 2509.10918)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from foveate.ops import dispatch
from foveate.ops.facility_location import facility_location

__all__ = ["Assignment", "soft_assignment"]


class Assignment(NamedTuple):
    """Result of `soft_assignment`.

    Attributes:
        picks: Destinations of each set [*sets, budget], ascending.
        gather: Merge weights [*sets, budget, tokens]; rows sum to 1, so that a merged token is a weighted mean.
        spread: Unmerge weights [*sets, budget, tokens]; columns sum to 1: the share of each destination in a token.
    """

    picks: Tensor
    gather: Tensor
    spread: Tensor


def soft_assignment(
    tokens: Float[Tensor, "*sets tokens dim"],
    budget: int,
    scale: float,
    destinations: Int[Tensor, "*sets budget"] | None = None,
) -> Assignment:
    """Destinations of each set, picked by facility location, and the softmax weights of all tokens over them.

    Similarity is cosine. Picks, scores and softmax are computed in float32 or better, except under autocast.

    Args:
        tokens: Feature vectors.
        budget: Number of destinations of each set.
        scale: Factor of the cosines in the softmax over destinations.
        destinations: Destinations to use instead of picking new ones, ascending.

    Raises:
        ValueError: If the budget is not between 1 and the number of tokens.
    """
    *sets, number, dim = tokens.shape
    if not 1 <= budget <= number:
        raise ValueError(f"the budget must be 1 to {number} of {number} tokens, not {budget}")
    backend = dispatch.choose("soft_assignment", tokens.device, tokens.dtype, number)
    given = None if destinations is None else destinations.reshape(-1, budget)
    parts = backend.run(tokens.reshape(-1, number, dim), budget, scale, given)
    return Assignment(*(part.view(*sets, *part.shape[1:]) for part in parts))


@dispatch.register("soft_assignment", "portable")
def portable(
    tokens: Tensor, budget: int, scale: float, destinations: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_assignment` of [sets, tokens, dim] in plain PyTorch."""
    z = normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
    similarity = z @ z.mT
    picks = facility_location(similarity, budget).sort(-1).values if destinations is None else destinations
    spread = (scale * similarity.take_along_dim(picks[..., None], 1)).softmax(1)
    gather = spread / spread.sum(-1, keepdim=True)
    return picks, gather.to(tokens.dtype), spread.to(tokens.dtype)


dispatch.register_kernels("soft_assignment", "merging")
