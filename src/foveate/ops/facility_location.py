"""Facility location: the tokens that best stand for all the others, picked greedily.

The objective is f(D) = sum over i of max over j in D of S_ij: every token i is served by the pick most like it. The
greedy choice is within 1 - 1/e of the best one where similarities are not negative (Nemhauser et al. 1978).

`facility_location` reads a matrix of similarities. `pick_in_turns` never builds one: it makes similarities from
embeddings as it needs them, and may fill several blocks in turns.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["Picked", "best_similarity", "facility_location", "pick_in_turns"]

LAZY_FROM = 1024  # tokens of a single set from which on most gains are left uncomputed
NEARLY = 1e-5  # gains that differ by less are equal: two tokens that serve each other alone tie but for rounding
ROUNDING = 1e-6  # a dot product of unit rows that is larger by less than this is no larger
AT_ONCE = 2**24  # similarities that are in memory together
PARTS = 32  # of the first gains, whose progress is shown
LOOKS = 32  # gains that are made anew first, to find the next pick


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


@dispatch.register("facility_location", "portable", takes=lambda *work: True)
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


class Picked(NamedTuple):
    """What `pick_in_turns` picked.

    Attributes:
        picks: The candidate picked in each turn.
        gains: By how much it raised the objective of its block, bonus included.
        covered: How well each represented item is served by the picks of each block.
    """

    picks: Int[Tensor, "turns"]
    gains: Float[Tensor, "turns"]
    covered: Float[Tensor, "blocks represented"]


def pick_in_turns(
    represented: Float[Tensor, "represented dim"],
    candidates: Float[Tensor, "candidates dim"],
    turns: Sequence[int],
    *,
    bonus: Float[Tensor, "candidates"] | None = None,
    classes: Int[Tensor, "candidates"] | None = None,
    room: Int[Tensor, "blocks classes"] | None = None,
    track: Callable[[str, int], Callable[[], None]] = lambda name, length: lambda: None,
) -> Picked:
    """Picks of blocks that take turns, each taking the free candidate that adds most to the block's own objective.

    The objective of a block is the sum over represented items of their best similarity, max(0, dot product), to a pick
    of the block, plus the bonus of its picks. Of gains within 1e-5 of the largest the first is taken; a similarity
    that grows by less than 1e-6 does not count. One block that has all the turns is `facility_location`.

    Memory grows with the number of items and of blocks, not with the square. A pick lowers all gains by what it serves
    better: the t-th of a block does so for about one in t of the represented items, and similarities to those alone
    are made. Rounding turns gains into bounds: where one could win the gain is made anew.

    Args:
        represented: Unit rows that are to be served.
        candidates: Unit rows to pick from.
        turns: The block, counted from 0, that picks in each turn.
        bonus: What a candidate is worth whatever it serves.
        classes: Class of each candidate, counted from 0; goes with `room`.
        room: How many candidates of each class a block may pick. None sets no limit.
        track: Shows progress.

    Raises:
        ValueError: If there are more turns than candidates.

    Examples:
        >>> rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]]))
        >>> pick_in_turns(rows, rows, [0, 0]).picks.tolist()
        [0, 2]
        >>> pick_in_turns(rows, rows, [0, 1, 1, 0]).picks.tolist()
        [0, 2, 1, 3]
    """
    if not 1 <= len(turns) <= len(candidates):
        raise ValueError(f"there must be 1 to {len(candidates)} turns for {len(candidates)} candidates: {len(turns)}")
    blocks = max(turns) + 1
    worth = candidates.new_zeros(len(candidates)) if bonus is None else bonus.clone()
    left = None if room is None else room.clone()
    first = _first_gains(represented, candidates, track)
    states = [_Block(represented, candidates, first) for _ in range(blocks)]
    picks, gains = [], []
    advance = track("picks", len(turns))
    for turn in turns:
        pick = states[turn].best(worth if left is None else worth.masked_fill((left[turn] < 1)[classes], -torch.inf))
        picks.append(pick)
        gains.append(states[turn].bounds[pick] + worth[pick])
        states[turn].add(pick)
        worth[pick] = -torch.inf  # taken
        if left is not None and classes is not None:
            left[turn, classes[pick]] -= 1
        advance()
    chosen = torch.tensor(picks, device=candidates.device)
    return Picked(chosen, torch.stack(gains), torch.stack([state.covered for state in states]))


def best_similarity(
    represented: Float[Tensor, "represented dim"], picks: Float[Tensor, "picks dim"]
) -> Float[Tensor, "represented"]:
    """How well each represented item is served: its largest max(0, dot product) with a pick. All are unit rows."""
    served = represented.new_zeros(len(represented))
    for some in picks.split(max(1, AT_ONCE // len(represented))):
        served = torch.maximum(served, (represented @ some.T).amax(1))
    return served


class _Block:
    """A block that grows: how well it serves, and for every candidate a bound of what it would add."""

    def __init__(
        self,
        represented: Float[Tensor, "represented dim"],
        candidates: Float[Tensor, "candidates dim"],
        gains: Float[Tensor, "candidates"],
    ) -> None:
        self.represented, self.candidates = represented, candidates
        self.covered = represented.new_zeros(len(represented))
        self.bounds = gains.clone()
        self.fresh = torch.ones_like(gains, dtype=torch.bool)  # bounds that are gains

    def best(self, worth: Float[Tensor, "candidates"]) -> int:
        """The candidate of largest gain and worth. Looks, twice as many each time, at those that could still win."""
        size = LOOKS
        while True:
            stale = (self.bounds + worth).masked_fill(self.fresh, -torch.inf).topk(min(size, len(worth))).indices
            self.bounds[stale] = _gains(self.represented, self.candidates[stale], self.covered)
            self.fresh[stale] = True
            total = self.bounds + worth
            best = total.max()
            near = total >= best - NEARLY * best.abs()
            if not (near & ~self.fresh).any():
                return int(near.int().argmax())  # a number: indexing by a tensor would wait for the device each time
            size = min(2 * size, max(LOOKS, AT_ONCE // len(self.represented)))

    def add(self, pick: int) -> None:
        """Take the candidate in, and lower the bounds by what was served better by it: ever fewer items."""
        covered = torch.maximum(self.covered, self.represented @ self.candidates[pick])
        changed = (covered > self.covered).nonzero()[:, 0]
        if len(changed):
            drops = _drops(self.represented[changed], self.candidates, self.covered[changed], covered[changed])
            self.bounds = (self.bounds - (1 - NEARLY) * drops).clamp(min=0)  # rounding must not make one too low
        self.covered, self.fresh = covered, self.bounds == 0  # those cannot shrink


def _first_gains(
    represented: Float[Tensor, "represented dim"],
    candidates: Float[Tensor, "candidates dim"],
    track: Callable[[str, int], Callable[[], None]],
) -> Float[Tensor, "candidates"]:
    """What each candidate adds to an empty block."""
    parts = represented.split(-(-len(represented) // PARTS))
    advance, gains = track("first gains", len(parts)), candidates.new_zeros(len(candidates))
    for part in parts:
        nothing = part.new_zeros(len(part))
        gains += _drops(part, candidates, nothing, torch.full_like(nothing, torch.inf))
        advance()
    return gains


def _gains(
    represented: Float[Tensor, "represented dim"],
    some: Float[Tensor, "some dim"],
    served: Float[Tensor, "represented"],
) -> Float[Tensor, "some"]:
    return _sum(torch.addmm(served, some, represented.T, beta=-1))


def _drops(
    represented: Float[Tensor, "changed dim"],
    candidates: Float[Tensor, "candidates dim"],
    before: Float[Tensor, "changed"],
    after: Float[Tensor, "changed"],
) -> Float[Tensor, "candidates"]:
    """By how much the gains shrink as these items are served better."""
    backend = dispatch.choose("coverage_drops", candidates.device, candidates.dtype, candidates.shape[1])
    return backend.run(represented, candidates, before, after)


@dispatch.register("coverage_drops", "portable", takes=lambda *work: True)
def portable_drops(represented: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """For each candidate the sum over items of clamp(similarity, before, after) - before, in plain PyTorch."""
    drops = []
    for some in candidates.split(max(1, AT_ONCE // len(represented))):
        drops.append((some @ represented.T).clamp_(before, after).sub_(before).sum(1))
    return torch.cat(drops)


def _sum(more: Float[Tensor, "some represented"]) -> Float[Tensor, "some"]:
    """The sum of what is more than rounding; overwrites it."""
    return torch.threshold_(more, ROUNDING, 0.0).sum(1)


dispatch.register_kernels("facility_location")
