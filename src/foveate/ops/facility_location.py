"""Greedy facility location: the items that together represent all items best.

The objective of a set D is f(D) = sum over items i of max over j in D of S_ij: every item is represented by the pick
most similar to it. The greedy set is within 1 - 1/e of the best one where similarities are not negative
(Nemhauser et al., 1978). Two functions share this definition:

* `facility_location` takes matrices of similarities, many small sets at once: ToMA's destinations.
* `round_robin_greedy` takes embeddings, never builds the matrix, and lets several blocks take turns: Sub-CP's blocks.

Large sets are picked lazily (`_LazyGreedy`): gains only shrink while picks are added (Minoux, 1978), so most of them
never need to be recomputed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch
from foveate.utils.progress import Track, silent

__all__ = ["TIE", "GreedyPicks", "best_similarity", "facility_location", "round_robin_greedy"]

TIE = 1e-5  # gains with a smaller relative difference are equal, as are those of two tokens that represent each other
ROUNDING = 1e-6  # dot products of unit rows with a smaller difference are equal
LAZY_FROM = 1024  # tokens of a set from which on a CPU picks lazily
CHUNK = 2**24  # similarities in memory at a time
REFRESHED = 32  # gains that a round recomputes
FIRST_GAINS_STEPS = 32  # steps of the progress bar of the first gains
WARM_UP_ROUNDS = 3  # rounds before the CUDA graph of a round is captured
MIN_PICKS_TO_CAPTURE = 64  # capturing takes as long as some dozens of rounds
REPLAYS = 16  # rounds between two queries of the number of picks, each of which waits for the GPU


def facility_location(similarity: Float[Tensor, "*batch tokens tokens"], budget: int) -> Int[Tensor, "*batch budget"]:
    """The `budget` tokens of each set that represent the set best, in the order in which they are picked.

    The first pick has the largest sum of similarities; each later pick adds most to the objective; no token is picked
    twice. Of gains within 1e-5 (relative) of the largest the first is taken, on every device. The first k picks are
    those for a budget of k.

    Args:
        similarity: S_ij, how well token j represents token i. Half precision is raised to float32.
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
    bonus, covered = similarity.new_zeros(len(similarity)), matrix.column(first)
    bonus[first] = -torch.inf
    greedy = _LazyGreedy(matrix, (budget - 1) * [0], covered[None], matrix.gains(slice(None), covered), bonus)
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
    """Greedy facility location of several blocks that take turns; each pick adds most to the objective of its block.

    A block's objective is the sum over represented items of the largest max(0, dot product) with one of its picks,
    plus the bonus of its picks. No candidate is picked twice. Of gains within 1e-5 of the largest the first is taken;
    a similarity that grows by less than 1e-6 does not count. With a single block this is `facility_location`.

    Memory grows with (represented items + candidates) x (dim + blocks), never with their product.

    Args:
        represented: Unit rows of the items to represent.
        candidates: Unit rows of the items to pick from.
        turns: Number of the block, from 0, that picks in each turn.
        bonus: Value of each candidate that does not depend on the other picks.
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
            f"block {turns[turn]} has no room for any candidate that is left in turn {turn}: give each block room for "
            "as many candidates as it has turns, and for no more of a class than there are"
        )
    return GreedyPicks(greedy.picks, greedy.gains, greedy.covered)


def best_similarity(
    represented: Float[Tensor, "represented dim"], picks: Float[Tensor, "picks dim"]
) -> Float[Tensor, "represented"]:
    """The largest max(0, dot product) of each represented item with a pick. All rows are unit vectors."""
    best = represented.new_zeros(len(represented))
    for chunk in picks.split(max(1, CHUNK // len(represented))):
        best = torch.maximum(best, (represented @ chunk.T).amax(1))
    return best


class _Matrix(NamedTuple):
    """Similarities from a matrix."""

    rows: Float[Tensor, "represented candidates"]
    columns: Float[Tensor, "candidates represented"]  # a copy: strided reads take ten times as long

    capturable = False  # as a CUDA graph: whether nothing below waits for the GPU

    def column(self, pick: Int[Tensor, "1"]) -> Float[Tensor, "represented"]:
        """Similarity of a candidate to every item."""
        return self.columns[pick][0]

    def gains(
        self, subset: Int[Tensor, "subset"] | slice, covered: Float[Tensor, "represented"]
    ) -> Float[Tensor, "subset"]:
        """Sum over items of max(0, similarity - covered) for a subset of the candidates."""
        return (self.columns[subset] - covered).clamp_(min=0).sum(1)

    def drops(
        self, before: Float[Tensor, "represented"], after: Float[Tensor, "represented"]
    ) -> Float[Tensor, "candidates"]:
        """Decrease of every candidate's gain when `covered` grows from `before` to `after`."""
        changed = (after > before).nonzero()[:, 0]
        before, after = before[changed, None], after[changed, None]
        return self.rows[changed].clamp_(before, after).sub_(before).sum(0)


class _Embeddings(NamedTuple):
    """Similarities computed from embeddings when they are needed. Methods as those of `_Matrix`."""

    represented: Float[Tensor, "represented dim"]
    candidates: Float[Tensor, "candidates dim"]

    @property
    def capturable(self) -> bool:
        return self.candidates.device.type == "cuda" and _drops_backend(self.candidates).name != "portable"

    def column(self, pick: Tensor) -> Tensor:
        return self.represented @ self.candidates[pick][0]

    def gains(self, subset: Tensor | slice, covered: Tensor) -> Tensor:
        more = torch.addmm(covered, self.candidates[subset], self.represented.T, beta=-1)
        return torch.threshold_(more, ROUNDING, 0.0).sum(1)

    def drops(self, before: Tensor, after: Tensor) -> Tensor:
        return _drops_backend(self.candidates).run(self.represented, self.candidates, before, after)


def _drops_backend(candidates: Float[Tensor, "candidates dim"]) -> dispatch.Backend:
    return dispatch.choose("coverage_drops", candidates.device, candidates.dtype, candidates.shape[1])


class _LazyGreedy:
    """Greedy picks that recompute few gains.

    Every block keeps an upper bound of each candidate's gain. A pick lowers all bounds by what it newly covers; the
    t-th pick of a block does so for about one in t of the items. Rounding makes these differences inexact, so a round
    recomputes the gains of the largest bounds, and picks if the best candidate is then certain. No shape in a round
    depends on values, so that a GPU replays rounds without waiting for the CPU.
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
        self.bonus = bonus  # minus infinity for what was picked
        self.room = None if room is None else room.clone()
        self.turns = torch.tensor(turns, device=gains.device)
        self.turn = self.turns.new_zeros(1)  # number of picks so far
        self.bounds = gains.repeat(len(covered), 1)
        self.exact = torch.ones_like(self.bounds, dtype=torch.bool)  # bounds that are gains
        self.picks, self.gains = torch.zeros_like(self.turns), gains.new_zeros(len(turns))

    def run(self) -> Iterator[int]:
        """Make all picks, and yield their number from time to time."""
        done = 0
        for _ in range(WARM_UP_ROUNDS):
            self.round()
            yield (done := int(self.turn))
        step, repeats = self.round, 1
        if self.similarity.capturable and done + MIN_PICKS_TO_CAPTURE < len(self.turns):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.round()
            step, repeats = graph.replay, REPLAYS
        while done < len(self.turns):
            for _ in range(repeats):
                step()
            yield (done := int(self.turn))

    def round(self) -> None:
        """Recompute the gains of the largest bounds, and pick if the best candidate is then known."""
        turn = self.turn.clamp(max=len(self.turns) - 1)
        block = self.turns[turn]
        bonus = self.bonus
        if self.room is not None:
            bonus = bonus.masked_fill((self.room[block][0] < 1)[self.classes], -torch.inf)
        bounds, exact, covered = self.bounds[block][0], self.exact[block][0], self.covered[block][0]
        refreshed = (bounds + bonus).masked_fill(exact, -torch.inf).topk(min(REFRESHED, len(bonus))).indices
        bounds[refreshed] = self.similarity.gains(refreshed, covered)
        exact.index_fill_(0, refreshed, True)
        total = bounds + bonus
        best = total.max()
        near = total >= best - TIE * best.abs()
        pick = near.int().argmax(0, keepdim=True)
        known = (self.turn < len(self.turns)) & ~(near & ~exact & (best > -torch.inf)).any()
        self.picks[turn] = pick.where(known, self.picks[turn])
        self.gains[turn] = total[pick].where(known, self.gains[turn])
        self.bonus[pick] = self.bonus[pick].masked_fill(known, -torch.inf)
        if self.room is not None and self.classes is not None:
            self.room[block, self.classes[pick]] -= known.to(self.room.dtype)
        self.turn += known
        after = torch.maximum(covered, self.similarity.column(pick)).where(known, covered)
        drops = self.similarity.drops(covered, after)
        bounds = (bounds - (1 - TIE) * drops).clamp(min=0)  # rounding must not make a bound too low
        self.covered[block] = after
        self.bounds[block] = bounds
        self.exact[block] = torch.where(known, bounds == 0, exact)  # a bound of 0 cannot shrink


def _first_gains(
    represented: Float[Tensor, "represented dim"], candidates: Float[Tensor, "candidates dim"], track: Track
) -> Float[Tensor, "candidates"]:
    """The gain of each candidate for an empty block."""
    parts = represented.split(-(-len(represented) // FIRST_GAINS_STEPS))
    advance, gains = track("first gains", len(parts)), candidates.new_zeros(len(candidates))
    for part in parts:
        nothing = part.new_zeros(len(part))
        gains += _Embeddings(part, candidates).drops(nothing, torch.full_like(nothing, torch.inf))
        advance()
    return gains


@dispatch.register("coverage_drops", "portable")
def portable_drops(represented: Tensor, candidates: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """For each candidate the sum over items of clamp(similarity, before, after) - before, in plain PyTorch."""
    changed = (after > before).nonzero()[:, 0]
    if not len(changed):
        return candidates.new_zeros(len(candidates))
    if len(changed) < len(represented):
        represented, before, after = represented[changed], before[changed], after[changed]
    chunks = candidates.split(max(1, CHUNK // len(represented)))
    return torch.cat([(chunk @ represented.T).clamp_(before, after).sub_(before).sum(1) for chunk in chunks])


dispatch.register_kernels("facility_location", "merging")
dispatch.register_kernels("coverage_drops", "merging")
