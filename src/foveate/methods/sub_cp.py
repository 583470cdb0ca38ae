"""Sub-CP: examples for in-context learning, split into blocks by a submodular objective (arXiv 2510.05130).

Reconstructed from the abstract and summaries; no code or numbers of the authors were available. The paper names the
objective (facility location) and four strategies; what the strategies compute is defined here:

1. An example serves another as well as max(0, cosine) of their embeddings says. A set covers the pool as well as each
   example of the pool is served by the nearest of the set, in the mean.
2. Selection picks the examples that cover the pool best, greedily.
3. Partition deals examples to blocks. In global strategies blocks take turns, each taking what covers most for itself;
   local ones cut the pool into regions around anchors, and fill a block from each.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops.deduplicate import keep_apart
from foveate.ops.example_blocks import ALIKE, Blocks, Embeddings, like, unit_rows
from foveate.ops.example_labels import Classes, classes_of
from foveate.ops.facility_location import GreedyPicks, best_similarity, round_robin_greedy
from foveate.utils.progress import Track, silent

__all__ = ["STRATEGIES", "Selection", "SubCP"]

STRATEGIES = "global_diverse", "global_local", "local_diverse", "local_coherent"
CHOICES = {"strategy": STRATEGIES, "order": ("picked", "central_last"), "balance": (None, "proportional", "equal")}


@dataclass(frozen=True, kw_only=True)
class SubCP:
    """Blocks of examples for in-context learning. `blocks=1` is plain concatenation of the selected examples.

    Reconstructed from the abstract and summaries; no code or numbers of the authors were available. There is no seed:
    the same embeddings give the same blocks, and of equal examples the first is taken.

    Attributes:
        blocks: How many blocks.
        block_size: Examples of each block. None uses every example; sizes then differ by 1 at most.
        strategy: "global_diverse": every block alone covers the pool. "global_local": all blocks together cover it,
            and each covers what they hold. "local_diverse": each block covers a region of its own. "local_coherent":
            each block is the middle of a region. When every example is used the first two give the same blocks, and so
            do the last two, but for the order inside.
        order: Inside a block: as "picked", or "central_last", the example nearest to the mean of the block at the end.
        balance: Labels of the chosen examples, dealt evenly to the blocks: "proportional" to the pool, or "equal".
            None does not look at labels. Not for local strategies: a region has the labels that it has.
        max_similarity: Examples whose cosine is larger never share a block: they are exchanged with what is most like
            them elsewhere. None allows copies.
        query_bonus: With queries, what an example equal to one of them is worth: as much as to serve so many examples
            perfectly.

    Examples:
        >>> embeddings = torch.eye(4).repeat(2, 1)  # four kinds of examples, twice
        >>> sub = SubCP(blocks=2, block_size=2)
        >>> sub.select(embeddings, 4).ids.tolist()
        [0, 1, 2, 3]
        >>> sub.partition(embeddings).ids
        [[0, 3], [1, 2]]

    Raises:
        ValueError: If an option is out of its range, or `balance` is asked of a local strategy.

    Source: arXiv 2510.05130.
    """

    blocks: int = 8
    block_size: int | None = 8
    strategy: Literal["global_diverse", "global_local", "local_diverse", "local_coherent"] = "global_local"
    order: Literal["picked", "central_last"] = "picked"
    balance: Literal["proportional", "equal"] | None = None
    max_similarity: float | None = None
    query_bonus: float = 1.0

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, not {getattr(self, name)!r}")
        for name in ("blocks", "block_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.balance and self._local:
            raise ValueError(
                f"a region has the labels that it has: {self.strategy} takes no balance={self.balance!r}; "
                "use global_local or global_diverse"
            )
        if self.max_similarity is not None and not 0 < self.max_similarity < 1:
            raise ValueError(f"max_similarity must be a cosine between 0 and 1, not {self.max_similarity}")
        if not 0 <= self.query_bonus < inf:
            raise ValueError(f"query_bonus must be finite and 0 or more, not {self.query_bonus}")

    def select(
        self,
        embeddings: Embeddings,
        n: int,
        *,
        labels: Sequence[Hashable] | None = None,
        queries: Embeddings | None = None,
        represent: Embeddings | None = None,
        track: Track = silent,
    ) -> "Selection":
        """The `n` examples that cover the pool best, greedily: within 1 - 1/e of the best set.

        Memory grows with the pool, not with its square.

        Args:
            embeddings: [examples, dim], of any length but 0.
            n: How many.
            labels: Of the examples, for `balance`.
            queries: [queries, dim]. Examples get a bonus for similarity to the nearest of them.
            represent: [others, dim], what is to be covered instead of the pool, e.g. a validation set.
            track: Shows progress.

        Raises:
            ValueError: If an embedding is NaN, infinite or 0, if there are fewer than `n`, or labels do not fit.
        """
        pool = unit_rows(embeddings)
        if not 1 <= n <= len(pool):
            raise ValueError(f"cannot select {n} of {len(pool)} examples: use n=1 to n={len(pool)}")
        others = None if represent is None else like(represent, pool, "represented item")
        picked = self._pick(pool, n, self._classes(labels, pool), self._bonus(pool, queries), others, track)
        covered, most = picked.covered.sum(), len(pool)
        if others is not None:
            most = best_similarity(others, pool).sum()
        return Selection(picked.picks, picked.gains, min(1.0, float(covered / most) if most > 0 else 0.0))

    def partition(
        self,
        embeddings: Embeddings,
        ids: Sequence[int] | Tensor | None = None,
        *,
        labels: Sequence[Hashable] | None = None,
        queries: Embeddings | None = None,
        track: Track = silent,
    ) -> Blocks:
        """Blocks of examples.

        Args:
            embeddings: [examples, dim] of the pool.
            ids: Examples that are to be dealt, all of them. None lets the strategy choose from the pool.
            labels: Of the pool, for `balance`.
            queries: [queries, dim], as in `select`; not with ids, without a block size, nor for "local_coherent".
            track: Shows progress.

        Raises:
            ValueError: As `select` does, and if the examples cannot fill the blocks, or not with `max_similarity`.
        """
        pool = unit_rows(embeddings)
        classes = self._classes(labels, pool)
        settled = ids is not None or self.block_size is None or self.strategy == "local_coherent"
        if queries is not None and settled:
            raise ValueError(
                "queries change what is chosen: leave out ids, give a block_size, and use another strategy than "
                "local_coherent"
            )
        chosen = torch.arange(len(pool)) if ids is None else _distinct(ids, len(pool))
        chosen = chosen.to(pool.device)
        n = self._number(len(chosen), given=ids is not None)
        bonus = self._bonus(pool, queries)
        if self._local:
            rows = pool[chosen]
            parts = [chosen[part] for part in self._regional(rows, bonus, track)]
        else:
            if self.strategy == "global_local" and n < len(chosen):
                chosen = self._pick(pool, n, classes, bonus, None, track).picks.sort().values
                bonus = None
            rows, kinds = pool[chosen], None if classes is None else classes.of(chosen)
            parts = [chosen[part] for part in self._in_turns(rows, n, kinds, bonus, track)]
        if self.max_similarity is not None:
            spare = _rest(parts, len(pool)) if ids is None else []
            parts = keep_apart(parts, spare, pool, self.max_similarity, None if classes is None else classes.codes)
        if self.order == "central_last":
            parts = [_central_last(part, pool[part]) for part in parts]
        return Blocks([part.tolist() for part in parts], pool)

    @property
    def _local(self) -> bool:
        return self.strategy.startswith("local")

    def _number(self, available: int, given: bool) -> int:
        """How many examples go into blocks."""
        size = self.block_size or 1
        if available < self.blocks * size:
            most = available // size
            remedy = f"use blocks<={most}" if most else f"use block_size<={available}, or None"
            raise ValueError(f"{available} examples cannot fill {self.blocks} blocks of {size}: {remedy}")
        if self.block_size is None:
            return available
        if given and available != self.blocks * size:
            raise ValueError(
                f"{available} given examples do not fill {self.blocks} blocks of {size} exactly: "
                f"give {self.blocks * size}, or use block_size=None"
            )
        return self.blocks * size

    def _classes(self, labels: Sequence[Hashable] | None, pool: Float[Tensor, "examples dim"]) -> Classes | None:
        if self.balance is None:
            return None
        if labels is None:
            raise ValueError(f"balance={self.balance!r} needs the labels of the examples: give labels=")
        return classes_of(labels, pool)

    def _bonus(self, pool: Float[Tensor, "examples dim"], queries: Embeddings | None) -> Tensor | None:
        if queries is None:
            return None
        return self.query_bonus * best_similarity(pool, like(queries, pool, "query"))

    def _pick(
        self,
        pool: Float[Tensor, "examples dim"],
        n: int,
        classes: Classes | None,
        bonus: Tensor | None,
        others: Tensor | None,
        track: Track,
    ) -> GreedyPicks:
        """One set that covers all."""
        room = None if classes is None else classes.quotas(n, self.balance == "equal")[None]
        codes = None if classes is None else classes.codes
        represented = pool if others is None else others
        return round_robin_greedy(represented, pool, n * [0], bonus=bonus, classes=codes, room=room, track=track)

    def _in_turns(
        self,
        rows: Float[Tensor, "examples dim"],
        n: int,
        classes: Classes | None,
        bonus: Tensor | None,
        track: Track,
    ) -> list[Tensor]:
        """Blocks that each cover all rows. The order of turns goes back and forth: nobody is always last."""
        rounds = [range(self.blocks)[:: 1 if r % 2 == 0 else -1] for r in range(n // self.blocks)]
        turns = [block for order in rounds for block in order] + list(range(n % self.blocks))
        room = codes = None
        if classes is not None:  # dealt like cards, class by class: of each class the blocks get the same, within 1
            quotas, codes = classes.quotas(n, self.balance == "equal"), classes.codes
            cards = torch.arange(len(quotas), device=rows.device).repeat_interleave(quotas)
            cells = torch.arange(n, device=rows.device) % self.blocks * len(quotas) + cards
            room = cells.bincount(minlength=self.blocks * len(quotas)).view(self.blocks, -1)
        picked = round_robin_greedy(rows, rows, turns, bonus=bonus, classes=codes, room=room, track=track)
        served = torch.tensor(turns, device=rows.device)
        return [picked.picks[served == block] for block in range(self.blocks)]

    def _regional(self, rows: Float[Tensor, "examples dim"], bonus: Tensor | None, track: Track) -> list[Tensor]:
        """Blocks that each come from a region."""
        anchors = round_robin_greedy(rows, rows, self.blocks * [0], track=track).picks
        similar = (rows @ rows[anchors].T * ALIKE).clamp(min=0).round()
        blocks: list[Tensor] = []
        for b, region in enumerate(_regions(similar, anchors.tolist())):
            size = self.block_size or len(region)
            inside = torch.tensor(region, device=rows.device)
            if self.strategy == "local_diverse":
                worth = None if bonus is None else bonus[inside]
                best = round_robin_greedy(rows[inside], rows[inside], size * [0], bonus=worth).picks
            else:
                closeness = similar[inside, b].masked_fill(inside == anchors[b], torch.inf)
                best = closeness.sort(descending=True, stable=True).indices[:size]
            blocks.append(inside[best])
        return blocks


class Selection(NamedTuple):
    """Examples that cover a pool.

    Attributes:
        ids: In the order of their picking; the first k are the selection of k, without balance.
        gains: What each added: the coverage that it added times the number of examples, and its query bonus.
        coverage: From 0 to 1: the mean similarity of each example to the nearest chosen one, and where others than the
            pool are represented, the part of it that the whole pool would reach.
    """

    ids: Int[Tensor, "n"]
    gains: Float[Tensor, "n"]
    coverage: float

    @property
    def saturated_at(self) -> int:
        """After so many picks nothing could be gained: all others went by their index."""
        return int((self.gains > 0).sum())


def _distinct(ids: Sequence[int] | Tensor, examples: int) -> Int[Tensor, "chosen"]:
    """The ids, ascending: ties go to the smaller index."""
    chosen = torch.as_tensor(ids).sort().values
    if chosen.ndim != 1 or not len(chosen) or chosen[0] < 0 or chosen[-1] >= examples:
        raise ValueError(f"ids must be a list of numbers from 0 to {examples - 1}, not {chosen.tolist()}")
    if len(twice := chosen[1:][chosen[1:] == chosen[:-1]]):
        raise ValueError(f"example {int(twice[0])} is among the ids twice: an example goes into one block")
    return chosen


def _rest(parts: Sequence[Tensor], examples: int) -> list[int]:
    """The examples that are in none of the parts."""
    left = torch.ones(examples, dtype=torch.bool)
    left[torch.cat(list(parts)).cpu()] = False
    return left.nonzero()[:, 0].tolist()


def _central_last(part: Int[Tensor, "block"], rows: Float[Tensor, "block dim"]) -> Int[Tensor, "block"]:
    central = (rows @ rows.mean(0) * ALIKE).round().argmax()
    return torch.cat([part[torch.arange(len(part), device=part.device) != central], part[central][None]])


def _regions(similar: Float[Tensor, "examples blocks"], anchors: list[int]) -> list[list[int]]:
    """The examples of each anchor. Surest first, each goes to its nearest anchor that has room; ties by index.

    All have the same room; where it does not come out even, the first that are full take one more.
    """
    preferred = similar.sort(dim=1, descending=True, stable=True).indices.tolist()
    surest = similar.amax(1).sort(descending=True, stable=True).indices.tolist()
    room, more = divmod(len(similar), len(anchors))
    regions = [[anchor] for anchor in anchors]
    placed = set(anchors)
    for example in (example for example in surest if example not in placed):
        for b in preferred[example]:
            extra = len(regions[b]) == room and more > 0
            if len(regions[b]) < room or extra:
                regions[b].append(example)
                more -= extra
                break
    return [sorted(region) for region in regions]
