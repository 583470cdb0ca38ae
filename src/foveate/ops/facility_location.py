"""Facility location: the tokens that best stand for all the others, picked greedily.

The objective is f(D) = sum over i of max over j in D of S_ij: every token i is served by the pick most like it. The
greedy choice is within 1 - 1/e of the best one where similarities are not negative (Nemhauser et al. 1978).
From embeddings, without that matrix, `foveate.ops.round_robin_greedy` picks.
"""

import heapq

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["NEARLY", "facility_location"]

LAZY_FROM = 1024  # tokens of a single set from which on most gains are left uncomputed
NEARLY = 1e-5  # gains that differ by less are equal: two tokens that serve each other alone tie but for rounding


def facility_location(similarity: Float[Tensor, "*batch tokens tokens"], budget: int) -> Int[Tensor, "*batch budget"]:
    """The `budget` tokens of each set that serve it best, in the order of their picking; no token twice.

    The first pick has the largest sum of similarities; each later one adds most to the objective. Of gains within 1e-5
    of the largest the first is taken, on every device. The first k picks are those for a budget of k.

    Args:
        similarity: S_ij says how well token j serves token i. Half precision is raised to float32.
        budget: How many tokens to pick.

    Raises:
        ValueError: If the budget is not between 1 and the number of tokens, or S is not square.

    Examples:
        >>> corners = torch.tensor([[0.0, 0.1], [0.0, 0.0], [5.0, 5.0], [5.0, 5.1]])
        >>> facility_location(-torch.cdist(corners, corners), 2).sort().values.tolist()
        [0, 2]
    """
    tokens = similarity.shape[-1]
    if similarity.shape[-2:] != (tokens, tokens):
        raise ValueError(f"similarity must be [..., tokens, tokens], got {list(similarity.shape)}")
    if not 1 <= budget <= tokens:
        raise ValueError(f"the budget must be 1 to {tokens} of {tokens} tokens, not {budget}")
    similarity = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
    backend = dispatch.choose("facility_location", similarity.device, similarity.dtype, tokens)
    picks = backend.run(similarity.reshape(-1, tokens, tokens), budget)
    return picks.view(*similarity.shape[:-2], budget)


@dispatch.register("facility_location", "portable")
def portable(similarity: Float[Tensor, "sets tokens tokens"], budget: int) -> Int[Tensor, "sets budget"]:
    """`facility_location` in plain PyTorch."""
    if similarity.device.type == "cpu" and similarity.shape[1] >= LAZY_FROM:
        return torch.stack([_lazily(one, budget) for one in similarity])
    return _together(similarity, budget)


def _together(similarity: Float[Tensor, "sets tokens tokens"], budget: int) -> Int[Tensor, "sets budget"]:
    """All gains of all sets at once, pick by pick."""
    pick = _first_best(similarity.sum(1))
    picks, taken = [pick], torch.zeros_like(similarity[:, 0], dtype=torch.bool)
    served = similarity.new_full(similarity.shape[:2], -torch.inf)
    for _ in range(budget - 1):
        taken.scatter_(1, pick[:, None], True)
        served = torch.maximum(served, _column(similarity, pick))
        gains = (similarity - served[:, :, None]).clamp(min=0).sum(1)
        pick = _first_best(gains.masked_fill(taken, -torch.inf))
        picks.append(pick)
    return torch.stack(picks, 1)


def _first_best(gains: Float[Tensor, "sets tokens"]) -> Int[Tensor, "sets"]:
    best = gains.max(1, keepdim=True).values
    return (gains >= best - NEARLY * best.abs()).int().argmax(1)


def _column(
    similarity: Float[Tensor, "sets tokens tokens"], pick: Int[Tensor, "sets"]
) -> Float[Tensor, "sets tokens"]:
    return similarity.gather(2, pick[:, None, None].expand(-1, similarity.shape[1], 1))[:, :, 0]


def _lazily(similarity: Float[Tensor, "tokens tokens"], budget: int) -> Int[Tensor, "budget"]:
    """One set. Gains only shrink while picks are added: one that was too small needs no new look (Minoux 1978)."""
    columns = similarity.mT.contiguous()
    pick = int(_first_best(columns.sum(1)[None]))
    picks, served = [pick], columns[pick]
    gains = (columns - served).clamp(min=0).sum(1)
    bounds = [(-gain, index) for index, gain in enumerate(gains.tolist()) if index != pick]
    heapq.heapify(bounds)
    while len(picks) < budget:
        if bounds[0][0] == 0:  # nothing is left to gain: by index
            return torch.tensor([*picks, *sorted(index for _, index in bounds)[: budget - len(picks)]])
        seen: list[tuple[float, int]] = []  # -gain and token, as they are now
        while bounds and (not seen or bounds[0][0] <= min(seen)[0] * (1 - NEARLY)):
            _, index = heapq.heappop(bounds)
            seen.append((-(columns[index] - served).clamp(min=0).sum().item(), index))
        enough = min(seen)[0] * (1 - NEARLY)
        pick = min(index for gain, index in seen if gain <= enough)
        for entry in seen:
            if entry[1] != pick:
                heapq.heappush(bounds, entry)
        picks.append(pick)
        served = torch.maximum(served, columns[pick])
    return torch.tensor(picks)


dispatch.register_kernels("facility_location", "merging")
