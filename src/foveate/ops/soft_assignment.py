"""Which tokens of a set stand for all of it, and how much of every token each of them is given."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from foveate.ops import dispatch
from foveate.ops.facility_location import facility_location

__all__ = ["Assignment", "soft_assignment"]


class Assignment(NamedTuple):
    """Sets of tokens, assigned to some of them.

    Attributes:
        picks: Which tokens they are assigned to [*sets, budget], ascending.
        gather: [*sets, budget, tokens], rows that sum to 1: a merged token is the mean of what it is given.
        spread: The same before that, columns that sum to 1: how much of a token each pick is given.
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
    """Pick the tokens that serve their set best, by facility location, and assign every token to them softly.

    Tokens are compared by their cosine; picks, scores and softmax are computed in float32 at least, but for autocast.

    Args:
        tokens: Feature vectors.
        budget: How many tokens of a set to pick.
        scale: Of the cosines in the softmax over the picks: how sharp it is.
        destinations: Assign to these tokens, ascending, and pick none.

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
