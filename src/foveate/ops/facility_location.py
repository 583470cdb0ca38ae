"""Greedy facility location: the items that together represent all items best.

The objective of a set D is f(D) = sum over items i of max over j in D of S_ij: every item is represented by its most
similar pick. If similarities are not negative, the greedy set is within 1 - 1/e of the best one (Nemhauser et al.,
1978). Two functions share this definition:

* `facility_location` takes matrices of similarities, many small sets at once: ToMA's destinations.
* `round_robin_greedy` takes embeddings, never builds the matrix, and lets several blocks take turns: Sub-CP's blocks.

Large sets are picked lazily (`_LazyGreedy`): gains only shrink while picks are added (Minoux, 1978), so most of them
never need to be recomputed.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch
from foveate.utils.cuda_graph import record_graph
from foveate.utils.progress import Track, silent

__all__ = ["TIE", "GreedyPicks", "best_similarity", "facility_location", "round_robin_greedy"]

TIE = 1e-5  # gains with a smaller relative difference are equal, as of two tokens that represent each other
ROUNDING = 1e-6  # dot products of unit rows with a smaller difference are equal
LAZY_FROM = 1024  # smallest set, in tokens, that CPUs pick lazily
CHUNK = 2**24  # similarities in memory at a time
TILE = 1024  # side of a tile of similarities that stays in the cache of a CPU
REFRESHED = 32  # gains recomputed in a round, and largest number of picks of a round
FIRST_GAINS_STEPS = 32  # steps of the progress bar of the first gains
WARM_UP_ROUNDS = 3  # rounds before the CUDA graphs of their steps are captured
MIN_PICKS_TO_CAPTURE = 64  # capturing takes as long as dozens of rounds


def facility_location(similarity: Float[Tensor, "*batch tokens tokens"], budget: int) -> Int[Tensor, "*batch budget"]:
    """Tokens of each set that represent the set best, `budget` of them, in the order of picking.

    The first pick has the largest sum of similarities; each later pick adds most to the objective; no token is picked
    twice. Of gains within 1e-5 (relative) of the largest the first is taken, on every device. The first k picks are
    the result for a budget of k.

    Args:
        similarity: S_ij, how well token j represents token i. Half precision is converted to float32.
        budget: Number of tokens to pick from each set.

    Raises:
        ValueError: If the budget is not between 1 and the number of tokens, or the matrix is not square.

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
    if similarity.device.type == "cpu" and similarity.shape[1] >= LAZY_FROM and budget > 1:
        return torch.stack([_pick_lazily(matrix, budget) for matrix in similarity])
    pick = _first_best(similarity.sum(1))
    picks, taken = [pick], torch.zeros_like(similarity[:, 0], dtype=torch.bool)
    covered = similarity.new_full(similarity.shape[:2], -torch.inf)
    for _ in range(budget - 1):
        taken.scatter_(1, pick[:, None], True)
        covered = torch.maximum(covered, similarity.take_along_dim(pick[:, None, None], 2)[..., 0])
        gains = (similarity - covered[:, :, None]).clamp(min=0).sum(1)
        pick = _first_best(gains.masked_fill(taken, -torch.inf))
        picks.append(pick)
    return torch.stack(picks, 1)


def _first_best(gains: Float[Tensor, "sets tokens"]) -> Int[Tensor, "sets"]:
    best = gains.max(1, keepdim=True).values
    return (gains >= best - TIE * best.abs()).int().argmax(1)


def _pick_lazily(similarity: Float[Tensor, "tokens tokens"], budget: int) -> Int[Tensor, "budget"]:
    matrix = _Matrix(similarity, similarity.mT.contiguous())
    first = _first_best(similarity.sum(0)[None])
    bonus, covered = similarity.new_zeros(len(similarity)), matrix.similar(first)
    bonus[first] = -torch.inf
    greedy = _LazyGreedy(matrix, (budget - 1) * [0], covered, _gains(matrix.columns, covered[0], 0.0), bonus)
    list(greedy.run())
    return torch.cat([first, greedy.picks])


class GreedyPicks(NamedTuple):
    """Result of `round_robin_greedy`.

    Attributes:
        picks: Candidate picked in each turn.
        gains: Increase of the block's objective by each pick, bonus included.
        covered: Similarity of each represented item to the nearest pick of each block.
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
) -> GreedyPicks:
    """Greedy facility location of several blocks in turns; each pick adds most to the objective of its block.

    A block's objective is the sum over represented items of the largest max(0, dot product) with one of its picks,
    plus the bonus of its picks. No candidate is picked twice. Of gains within 1e-5 of the largest the first is taken;
    a similarity that grows by less than 1e-6 does not count. With a single block this is `facility_location`.

    Memory grows with (represented items + candidates) x (dim + blocks), never with their product.

    Args:
        represented: Unit rows of the items to represent.
        candidates: Unit rows of the items to pick from.
        turns: Number of the picking block in each turn, from 0.
        bonus: Value of each candidate, independent of the other picks.
        classes: Class of each candidate, from 0. Requires `room`.
        room: Largest number of candidates of each class in each block. None sets no limit.
        track: Progress callback.

    Raises:
        ValueError: If there are more turns than candidates, or no free candidate fits the room of a block.

    Examples:
        >>> rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]]))
        >>> round_robin_greedy(rows, rows, [0, 0]).picks.tolist()
        [0, 2]
        >>> round_robin_greedy(rows, rows, [0, 1, 1, 0]).picks.tolist()
        [0, 2, 1, 3]
    """
    if not 1 <= len(turns) <= len(candidates):
        raise ValueError(f"there must be 1 to {len(candidates)} turns for {len(candidates)} candidates: {len(turns)}")
    bonus = candidates.new_zeros(len(candidates)) if bonus is None else bonus.clone()
    covered = represented.new_zeros(max(turns) + 1, len(represented))
    first_gains = _first_gains(represented, candidates, track)
    similarity = _Embeddings(represented, candidates)
    greedy = _LazyGreedy(similarity, turns, covered, first_gains, bonus, classes, room)
    advance, shown = track("picks", len(turns)), 0
    for done in greedy.run():
        for _ in range(done - shown):
            advance()
        shown = done
    if len(impossible := (greedy.gains == -torch.inf).nonzero()):
        turn = int(impossible[0])
        raise ValueError(
            f"block {turns[turn]} has no room for any remaining candidate in turn {turn}: give each block room for as "
            "many candidates as it has turns, and for no more of a class than exist"
        )
    return GreedyPicks(greedy.picks, greedy.gains, greedy.covered)


def best_similarity(
    represented: Float[Tensor, "represented dim"], picks: Float[Tensor, "picks dim"]
) -> Float[Tensor, "represented"]:
    """Largest max(0, dot product) of each represented item with a pick. All rows are unit vectors."""
    best = represented.new_zeros(len(represented))
    for chunk in picks.split(max(1, CHUNK // len(represented))):
        best = torch.maximum(best, (represented @ chunk.T).amax(1))
    return best


class _Matrix(NamedTuple):
    """Similarities from a matrix."""

    rows: Float[Tensor, "represented candidates"]
    columns: Float[Tensor, "candidates represented"]  # a copy: strided reads are ten times slower

    capturable = False  # whether the methods can be captured as a CUDA graph: none waits for the GPU
    rounding = 0.0  # largest difference of equal similarities

    def similar(self, subset: Int[Tensor, "subset"]) -> Float[Tensor, "subset represented"]:
        """Similarity of each candidate of a subset to every item."""
        return self.columns[subset]

    def drops(
        self, before: Float[Tensor, "represented"], after: Float[Tensor, "represented"]
    ) -> Float[Tensor, "candidates"]:
        """Decrease of every candidate's gain when `covered` grows from `before` to `after`."""
        changed = (after > before).nonzero()[:, 0]
        before, after = before[changed, None], after[changed, None]
        return self.rows[changed].clamp_(before, after).sub_(before).sum(0)


class _Embeddings(NamedTuple):
    """Similarities computed from embeddings on demand, with the methods of `_Matrix`."""

    represented: Float[Tensor, "represented dim"]
    candidates: Float[Tensor, "candidates dim"]

    rounding = ROUNDING

    @property
    def capturable(self) -> bool:
        return self.candidates.device.type == "cuda" and _drops_backend(self.candidates).name != "portable"

    def similar(self, subset: Tensor) -> Tensor:
        return self.candidates[subset] @ self.represented.T

    def drops(self, before: Tensor, after: Tensor) -> Tensor:
        return _drops_backend(self.candidates).run(self.represented, self.candidates, before, after)


def _gains(
    similar: Float[Tensor, "subset represented"], covered: Float[Tensor, "represented"], rounding: float
) -> Float[Tensor, "subset"]:
    """Sum over items of max(0, similarity - covered) for each candidate of a subset."""
    return torch.threshold_(similar - covered, rounding, 0.0).sum(1)


def _drops_backend(candidates: Float[Tensor, "candidates dim"]) -> dispatch.Backend:
    return dispatch.choose("coverage_drops", candidates.device, candidates.dtype, candidates.shape[1])


class _LazyGreedy:
    """Greedy picks that recompute few gains.

    Every block keeps an upper bound of each candidate's gain. Picks lower all bounds by their new coverage; the t-th
    pick of a block newly covers about one in t of the items. Rounding makes these differences inexact, so a round
    recomputes the gains of the largest bounds, and picks if the best candidate is then certain. It continues with the
    recomputed candidates, whose similarities it keeps, while their best gain is above all other bounds: gains only
    shrink, so these are still bounds, and the picks are the same as with all gains recomputed. Then it lowers the
    bounds for all of its picks at once. No shape depends on values, so that a GPU replays the three steps of a round.
    """

    def __init__(
        self,
        similarity: _Matrix | _Embeddings,
        turns: Sequence[int],
        covered: Float[Tensor, "blocks represented"],
        gains: Float[Tensor, "candidates"],
        bonus: Float[Tensor, "candidates"],
        classes: Int[Tensor, "candidates"] | None = None,
        room: Int[Tensor, "blocks classes"] | None = None,
    ) -> None:
        self.similarity, self.covered, self.classes = similarity, covered.clone(), classes
        self.bonus = bonus  # minus infinity for picked candidates
        self.room = None if room is None else room.clone()
        self.turns = torch.tensor(turns, device=gains.device)
        self.turn = self.turns.new_zeros(1)  # number of picks so far
        self.bounds = gains.repeat(len(covered), 1)
        self.exact = torch.ones_like(self.bounds, dtype=torch.bool)  # bounds that are gains
        self.picks, self.gains = torch.zeros_like(self.turns), gains.new_zeros(len(turns))
        # state of a round
        self.block = self.turns.new_zeros(1)
        self.before = covered[0].clone()  # `covered` of the block at the start of the round
        self.refreshed = self.turns.new_zeros(min(REFRESHED, len(bonus)))
        self.similar = covered.new_zeros(len(self.refreshed), covered.shape[1])  # of the refreshed candidates
        self.others = gains.new_zeros(())  # largest bound of all other candidates
        self.certain = self.turn > 0  # whether the last pick was certain

    def run(self) -> Iterator[int]:
        """Make all picks, and yield the number of picks so far at intervals."""
        begin, extend, lower = self.begin, self.extend, self.lower
        turns = self.turns.tolist()
        done, rounds, most = 0, 0, 2
        while done < len(turns):
            if rounds == WARM_UP_ROUNDS and self.similarity.capturable and done + MIN_PICKS_TO_CAPTURE < len(turns):
                self.certain.fill_(False)
                self.extend()  # picks nothing; the first call of a step must not be captured
                begin, extend, lower = (record_graph(step)[0] for step in (begin, extend, lower))
            ahead = turns[done : done + most]
            begin()
            for _ in takewhile(ahead[0].__eq__, ahead[1:]):
                extend()
            lower()
            made = int(self.turn) - done
            rounds, done, most = rounds + 1, done + made, min(2 * max(1, made), len(self.refreshed))
            yield done

    def begin(self) -> None:
        """Recompute the gains of the largest bounds, and pick if the best candidate is then certain."""
        self.block.copy_(self.turns[self.turn.clamp(max=len(self.turns) - 1)])
        self.before.copy_(self.covered[self.block][0])
        bounds, exact, bonus = self.bounds[self.block][0], self.exact[self.block][0], self.allowed_bonus(slice(None))
        outdated = (bounds + bonus).masked_fill(exact, -torch.inf)
        self.refreshed.copy_(outdated.topk(len(self.refreshed)).indices)
        self.similar.copy_(self.similarity.similar(self.refreshed))
        bounds[self.refreshed] = _gains(self.similar, self.before, self.similarity.rounding)
        exact.index_fill_(0, self.refreshed, True)
        self.bounds[self.block], self.exact[self.block] = bounds, exact
        total = bounds + bonus
        best = total.max()
        near = total >= best - TIE * best.abs()
        pick = near.int().argmax(0, keepdim=True)
        self.certain.copy_(~(near & ~exact & (best > -torch.inf)).any())
        self.pick(pick, total[pick], self.similarity.similar(pick)[0])
        self.others.copy_(total.index_fill(0, torch.cat([self.refreshed, pick]), -torch.inf).max())

    def extend(self) -> None:
        """Pick the best refreshed candidate if no other can be as good."""
        rounding, count = self.similarity.rounding, len(self.refreshed)
        dispatch.choose("pick_refreshed", self.bonus.device, self.bonus.dtype, count).run(self, TIE, rounding)

    def lower(self) -> None:
        """Lower the bounds of the block by the new coverage of this round."""
        drops = self.similarity.drops(self.before, self.covered[self.block][0])
        bounds = (self.bounds[self.block][0] - (1 - TIE) * drops).clamp(min=0)  # rounding must not make them too low
        self.bounds[self.block] = bounds
        # a bound of 0 cannot shrink; all others count as changed, so that the next round refreshes the largest
        self.exact[self.block] &= ~(drops > 0).any() | (bounds == 0)

    def allowed_bonus(self, subset: Int[Tensor, "subset"] | slice) -> Float[Tensor, "subset"]:
        """Bonus of each candidate of a subset; minus infinity if the block cannot pick it."""
        bonus = self.bonus[subset]
        if self.room is None or self.classes is None:
            return bonus
        return bonus.masked_fill((self.room[self.block][0] < 1)[self.classes[subset]], -torch.inf)

    def pick(self, pick: Int[Tensor, "1"], gain: Float[Tensor, "1"], similar: Float[Tensor, "represented"]) -> None:
        """Pick a candidate, unless another one may be better or all picks are complete."""
        self.certain &= self.turn < len(self.turns)
        turn = self.turn.clamp(max=len(self.turns) - 1)
        self.picks[turn] = pick.where(self.certain, self.picks[turn])
        self.gains[turn] = gain.where(self.certain, self.gains[turn])
        self.bonus[pick] = self.bonus[pick].masked_fill(self.certain, -torch.inf)
        if self.room is not None and self.classes is not None:
            self.room[self.block, self.classes[pick]] -= self.certain.to(self.room.dtype)
        self.turn += self.certain
        covered = self.covered[self.block][0]
        self.covered[self.block] = torch.maximum(covered, similar).where(self.certain, covered)


@dispatch.register("pick_refreshed", "portable")
def portable_pick(greedy: _LazyGreedy, tie: float, rounding: float) -> None:
    """`_LazyGreedy.extend` in plain PyTorch."""
    gains = _gains(greedy.similar, greedy.covered[greedy.block][0], rounding)
    total = gains + greedy.allowed_bonus(greedy.refreshed)
    best = total.max()
    enough = best - tie * best.abs()
    row = greedy.refreshed.masked_fill(total < enough, len(greedy.bonus)).argmin(0, keepdim=True)
    greedy.certain &= enough > greedy.others
    greedy.pick(greedy.refreshed[row], total[row], greedy.similar[row][0])


def _first_gains(
    represented: Float[Tensor, "represented dim"], candidates: Float[Tensor, "candidates dim"], track: Track
) -> Float[Tensor, "candidates"]:
    """Gain of each candidate for an empty block."""
    parts = represented.split(-(-len(represented) // FIRST_GAINS_STEPS))
    advance, gains = track("first gains", len(parts)), candidates.new_zeros(len(candidates))
    for part in parts:
        nothing = part.new_zeros(len(part))
        gains += _Embeddings(part, candidates).drops(nothing, torch.full_like(nothing, torch.inf))
        advance()
    return gains


@dispatch.register("coverage_drops", "portable")
def portable_drops(represented: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Sum over items of clamp(similarity, before, after) - before for each candidate, in plain PyTorch."""
    drops = candidates.new_zeros(len(candidates))
    for changed in (after > before).nonzero()[:, 0].split(TILE):
        items, low, high = represented[changed], before[changed], after[changed]
        parts = [(chunk @ items.T).clamp_(low, high).sub_(low).sum(1) for chunk in candidates.split(TILE)]
        drops += torch.cat(parts)
    return drops


dispatch.register_kernels("facility_location", "merging")
dispatch.register_kernels("coverage_drops", "merging")
dispatch.register_kernels("pick_refreshed", "merging")
