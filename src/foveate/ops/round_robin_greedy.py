"""Facility location from embeddings: picks of one block, or of several that take turns, without a matrix.

A pick lowers all gains by what it serves better: the t-th of a block does so for about one in t of the represented
items, and similarities to those alone are made. Rounding turns gains into bounds: where one could win, the gain is
made anew. Picking goes in rounds, each of which looks at some bounds and picks if it then knows the best. Nothing of a
round has a size that depends on numbers, so that a GPU replays it without waiting.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foveate.ops import dispatch
from foveate.ops.facility_location import NEARLY
from foveate.utils.progress import Track, silent

__all__ = ["Picked", "best_similarity", "round_robin_greedy"]

ROUNDING = 1e-6  # a dot product of unit rows that is larger by less than this is no larger
AT_ONCE = 2**24  # similarities that are in memory together
PARTS = 32  # of the first gains, whose progress is shown
LOOKS = 32  # gains that a round makes anew
WARM = 3  # rounds before one is recorded, which takes as long as some dozens of them
FEW = 64  # picks for which none is
REPLAYS = 16  # rounds between two looks at how many picks there are


class Picked(NamedTuple):
    """What `round_robin_greedy` picked.

    Attributes:
        picks: The candidate picked in each turn.
        gains: By how much it raised the objective of its block, bonus included.
        covered: How well each represented item is served by the picks of each block.
    """

    picks: Int[Tensor, "turns"]
    gains: Float[Tensor, "turns"]
    covered: Float[Tensor, "blocks represented"]


def round_robin_greedy(
    represented: Float[Tensor, "represented dim"],
    candidates: Float[Tensor, "candidates dim"],
    turns: Sequence[int],
    *,
    bonus: Float[Tensor, "candidates"] | None = None,
    classes: Int[Tensor, "candidates"] | None = None,
    room: Int[Tensor, "blocks classes"] | None = None,
    track: Track = silent,
) -> Picked:
    """Picks of blocks that take turns, each taking the free candidate that adds most to the block's own objective.

    The objective of a block is the sum over represented items of their best similarity, max(0, dot product), to a pick
    of the block, plus the bonus of its picks. Of gains within 1e-5 of the largest the first is taken; a similarity
    that grows by less than 1e-6 does not count. One block that has all the turns is `facility_location`.

    Memory grows with the number of items times that of blocks, not with the square.

    Args:
        represented: Unit rows that are to be served.
        candidates: Unit rows to pick from.
        turns: The block, counted from 0, that picks in each turn.
        bonus: What a candidate is worth whatever it serves.
        classes: Class of each candidate, counted from 0; goes with `room`.
        room: How many candidates of each class a block may pick. None sets no limit.
        track: Shows progress.

    Raises:
        ValueError: If there are more turns than candidates, or no candidate is left that the block of a turn has room
            for.

    Examples:
        >>> rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]]))
        >>> round_robin_greedy(rows, rows, [0, 0]).picks.tolist()
        [0, 2]
        >>> round_robin_greedy(rows, rows, [0, 1, 1, 0]).picks.tolist()
        [0, 2, 1, 3]
    """
    if not 1 <= len(turns) <= len(candidates):
        raise ValueError(f"there must be 1 to {len(candidates)} turns for {len(candidates)} candidates: {len(turns)}")
    worth = candidates.new_zeros(len(candidates)) if bonus is None else bonus.clone()
    first = _first_gains(represented, candidates, track)
    picking = _Picking(represented, candidates, turns, first, worth, classes, room)
    advance, seen = track("picks", len(turns)), 0
    for done in picking.rounds():
        for _ in range(done - seen):
            advance()
        seen = done
    if len(empty := (picking.gains == -torch.inf).nonzero()):
        turn = int(empty[0])
        raise ValueError(
            f"block {turns[turn]} has no room for any candidate that is left in turn {turn}: give blocks room for as "
            "many of each class as they have turns, and no more of a class than there are"
        )
    return Picked(picking.picks, picking.gains, picking.covered)


def best_similarity(
    represented: Float[Tensor, "represented dim"], picks: Float[Tensor, "picks dim"]
) -> Float[Tensor, "represented"]:
    """How well each represented item is served: its largest max(0, dot product) with a pick. All are unit rows."""
    served = represented.new_zeros(len(represented))
    for some in picks.split(max(1, AT_ONCE // len(represented))):
        served = torch.maximum(served, (represented @ some.T).amax(1))
    return served


class _Picking:
    """Blocks that grow: how well each serves, and for every candidate a bound of what it would add to each."""

    def __init__(
        self,
        represented: Float[Tensor, "represented dim"],
        candidates: Float[Tensor, "candidates dim"],
        turns: Sequence[int],
        gains: Float[Tensor, "candidates"],
        worth: Float[Tensor, "candidates"],
        classes: Int[Tensor, "candidates"] | None,
        room: Int[Tensor, "blocks classes"] | None,
    ) -> None:
        self.represented, self.candidates, self.worth, self.classes = represented, candidates, worth, classes
        self.left = None if room is None else room.clone()
        self.turns = torch.tensor(turns, device=candidates.device)
        self.turn = self.turns.new_zeros(1)  # how many picks there are
        blocks = max(turns) + 1
        self.covered = represented.new_zeros(blocks, len(represented))
        self.bounds = gains.repeat(blocks, 1)
        self.fresh = torch.ones_like(self.bounds, dtype=torch.bool)  # bounds that are gains
        self.picks, self.gains = torch.zeros_like(self.turns), candidates.new_zeros(len(turns))

    def rounds(self) -> Iterator[int]:
        """Goes on until all picks are made; how many there are, now and then."""
        done = 0
        for _ in range(WARM):
            self.round()
            yield (done := int(self.turn))
        kernels = _backend(self.candidates).name != "portable"
        recorded = self.candidates.device.type == "cuda" and kernels and done + FEW < len(self.turns)
        again, times = (_recorded(self.round), REPLAYS) if recorded else (self.round, 1)
        while done < len(self.turns):
            for _ in range(times):
                again()
            yield (done := int(self.turn))

    def round(self) -> None:
        """Makes the gains of the largest bounds anew, and picks if the best of all is among them, or was known."""
        turn = self.turn.clamp(max=len(self.turns) - 1)
        block = self.turns[turn]
        worth = self.worth
        if self.left is not None:
            worth = worth.masked_fill((self.left[block][0] < 1)[self.classes], -torch.inf)
        bounds, fresh, covered = self.bounds[block][0], self.fresh[block][0], self.covered[block][0]
        stale = (bounds + worth).masked_fill(fresh, -torch.inf).topk(min(LOOKS, len(worth))).indices
        bounds[stale] = _gains(self.represented, self.candidates[stale], covered)
        fresh.index_fill_(0, stale, True)
        total = bounds + worth
        best = total.max()
        near = total >= best - NEARLY * best.abs()
        pick = near.int().argmax(0, keepdim=True)
        knows = (self.turn < len(self.turns)) & ~(near & ~fresh & (best > -torch.inf)).any()
        self._take(turn, block, pick, total[pick], knows)

        served = torch.maximum(covered, self.represented @ self.candidates[pick][0]).where(knows, covered)
        drops = _drops(self.represented, self.candidates, covered, served)
        bounds = (bounds - (1 - NEARLY) * drops).clamp(min=0)  # rounding must not make one too low
        self.covered[block] = served
        self.bounds[block] = bounds
        self.fresh[block] = torch.where(knows, bounds == 0, fresh)  # those cannot shrink

    def _take(
        self,
        turn: Int[Tensor, "1"],
        block: Int[Tensor, "1"],
        pick: Int[Tensor, "1"],
        gain: Float[Tensor, "1"],
        knows: Bool[Tensor, "1"],
    ) -> None:
        """Write the pick down, and that it is free no more, if that is known."""
        self.picks[turn] = pick.where(knows, self.picks[turn])
        self.gains[turn] = gain.where(knows, self.gains[turn])
        self.worth[pick] = self.worth[pick].masked_fill(knows, -torch.inf)
        if self.left is not None and self.classes is not None:
            self.left[block, self.classes[pick]] -= knows.to(self.left.dtype)
        self.turn += knows


def _recorded(call: Callable[[], None]) -> Callable[[], None]:
    """The same work on the GPU, launched as one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _first_gains(
    represented: Float[Tensor, "represented dim"],
    candidates: Float[Tensor, "candidates dim"],
    track: Track,
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
    """The sum of what is more than rounding."""
    more = torch.addmm(served, some, represented.T, beta=-1)
    return torch.threshold_(more, ROUNDING, 0.0).sum(1)


def _backend(candidates: Float[Tensor, "candidates dim"]) -> dispatch.Backend:
    return dispatch.choose("coverage_drops", candidates.device, candidates.dtype, candidates.shape[1])


def _drops(
    represented: Float[Tensor, "represented dim"],
    candidates: Float[Tensor, "candidates dim"],
    before: Float[Tensor, "represented"],
    after: Float[Tensor, "represented"],
) -> Float[Tensor, "candidates"]:
    """By how much the gains shrink as these items are served better."""
    return _backend(candidates).run(represented, candidates, before, after)


@dispatch.register("coverage_drops", "portable")
def portable_drops(represented: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """For each candidate the sum over items of clamp(similarity, before, after) - before, in plain PyTorch."""
    changed = (after > before).nonzero()[:, 0]
    if not len(changed):
        return candidates.new_zeros(len(candidates))
    if len(changed) < len(represented):
        represented, before, after = represented[changed], before[changed], after[changed]
    drops = []
    for some in candidates.split(max(1, AT_ONCE // len(represented))):
        drops.append((some @ represented.T).clamp_(before, after).sub_(before).sum(1))
    return torch.cat(drops)


dispatch.register_kernels("coverage_drops", "merging")
