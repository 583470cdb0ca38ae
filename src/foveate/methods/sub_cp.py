"""Sub-CP: examples for in-context learning, split into blocks by a submodular objective (arXiv 2510.05130).

Reconstructed from the abstract and summaries; no code or numbers of the authors were available. The paper names the
objective (facility location) and four strategies; what the strategies compute is defined here:

1. Similarity is max(0, cosine) of embeddings. The coverage of a set is the mean, over the examples of the pool, of
   the similarity to the most similar example of the set.
2. `select` picks the examples that cover the pool best, greedily.
3. `partition` assigns examples to blocks. In global strategies the blocks take turns, each picking the example that
   adds most to its coverage. Local strategies divide the pool into regions around anchors, one for each block.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.deduplicate import deduplicate
from foveate.methods.example_blocks import Blocks, Classes, Embeddings, classes_of, rounded, unit_rows, unit_rows_like
from foveate.ops.facility_location import GreedyPicks, best_similarity, round_robin_greedy
from foveate.utils.choices import check_options
from foveate.utils.progress import Track, silent

__all__ = ["STRATEGIES", "Balance", "Order", "Selection", "Strategy", "SubCP"]

SPARE = 4
"""Smallest number of candidates for each pick."""

Strategy = Literal["global_diverse", "global_local", "local_diverse", "local_coherent"]
Order = Literal["picked", "central_last"]
Balance = Literal["proportional", "equal"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True)
class SubCP:
    """Blocks of examples for in-context learning. `blocks=1` is plain concatenation of the selected examples.

    Reconstructed from the abstract and summaries; no code or numbers of the authors were available. Results are
    deterministic: of equal examples the first is taken.

    Attributes:
        blocks: Number of blocks.
        block_size: Number of examples in each block. None uses every example; block sizes then differ by at most 1.
        strategy: "global_diverse": every block covers the pool. "global_local": all blocks together cover the pool,
            and every block covers their union. "local_diverse": every block covers a different region.
            "local_coherent": every block is the first pick of a region and its nearest examples. If every example is
            used, the first two strategies give the same blocks, and so do the last two, except for the order inside.
        order: Order inside a block: "picked", or "central_last", which moves the example nearest to the mean of the
            block to the end.
        balance: Labels of the selected examples, spread evenly over the blocks: "proportional" to the pool, but at
            least one example of each label if there is room, or "equal". None ignores labels. Not for local
            strategies, whose regions determine the labels.
        max_similarity: Largest cosine of two examples of a block, see `foveate.methods.deduplicate`; None: no limit.
        query_bonus: Bonus of an example that equals a query, in units of perfectly represented examples.
        candidates: Largest number of examples to pick from, at least four times as many as are picked. Of a larger
            pool so many are drawn, the same in every run, with at least four times its share of each label under
            `balance`; they still cover the whole pool. None picks from all, at a cost that grows with the square of
            the pool. Not for "local_coherent", whose blocks are the examples nearest to a pick.

    Examples:
        >>> embeddings = torch.eye(4).repeat(2, 1)  # four kinds of examples, twice
        >>> sub = SubCP(blocks=2, block_size=2)
        >>> sub.select(embeddings, 4).ids.tolist()
        [0, 1, 2, 3]
        >>> sub.partition(embeddings).ids
        [[0, 3], [1, 2]]

    Raises:
        ValueError: If an option is out of its range, or `balance` is combined with a local strategy.

    Source: arXiv 2510.05130.
    """

    blocks: int = 8
    block_size: int | None = 8
    strategy: Strategy = "global_local"
    order: Order = "picked"
    balance: Balance | None = None
    max_similarity: float | None = None
    query_bonus: float = 1.0
    candidates: int | None = 4096

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("blocks", "block_size", "candidates"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.balance and self._local:
            raise ValueError(
                f"{self.strategy} cannot balance labels, which its regions determine: "
                "use global_local or global_diverse"
            )
        if self.max_similarity is not None and not 0 < self.max_similarity < 1:
            raise ValueError(f"the largest similarity must be a cosine between 0 and 1, not {self.max_similarity}")
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
        """The `n` examples that cover the pool best, picked greedily: within 1 - 1/e of the best set.

        Memory grows linearly with the pool.

        Args:
            embeddings: Embeddings of the pool [examples, dim], of any length except 0.
            n: Number of examples to select.
            labels: Label of each example, for `balance`.
            queries: Embeddings [queries, dim]. Examples get a bonus for their similarity to the nearest query.
            represent: Embeddings [items, dim] to cover instead of the pool, such as a validation set.
            track: Progress callback.

        Raises:
            ValueError: If an embedding is NaN, infinite or 0, the pool has fewer than `n` examples, or the labels do
                not fit.
        """
        pool = unit_rows(embeddings)
        if not 1 <= n <= len(pool):
            raise ValueError(f"cannot select {n} of {len(pool)} examples: use n=1 to n={len(pool)}")
        items = pool if represent is None else unit_rows_like(represent, pool, "represented item")
        picked = self._pick(items, pool, n * [0], self._classes(labels, pool), self._bonus(pool, queries), track)
        most = len(pool) if represent is None else best_similarity(items, pool).sum()
        coverage = float(picked.covered.sum() / most) if most > 0 else 0.0
        return Selection(picked.picks, picked.gains, min(1.0, coverage))

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
            embeddings: Embeddings of the pool [examples, dim], of any length except 0.
            ids: Indices of the examples to assign to blocks, all of them. None lets the strategy select from the pool.
            labels: Label of each example of the pool, for `balance`.
            queries: Embeddings [queries, dim], as in `select`. Not together with `ids`, with `block_size=None`, or
                with "local_coherent".
            track: Progress callback.

        Raises:
            ValueError: As `select`, and if the examples cannot fill the blocks or cannot meet `max_similarity`.

        Without `balance`, blocks may lack a label: see `Blocks.lost`.
        """
        pool = unit_rows(embeddings)
        classes = self._classes(labels, pool)
        no_choice = ids is not None or self.block_size is None or self.strategy == "local_coherent"
        if queries is not None and no_choice:
            raise ValueError(
                "queries change which examples are selected: leave out ids, give a block_size, and use another "
                "strategy than local_coherent"
            )
        chosen = torch.arange(len(pool)) if ids is None else _distinct(ids, len(pool))
        chosen = chosen.to(pool.device)
        n = self._number(len(chosen), given=ids is not None)
        bonus = self._bonus(pool, queries)
        if self._local:
            rows = pool[chosen]
            parts = [chosen[part] for part in self._from_regions(rows, bonus, track)]
        else:
            if self.strategy == "global_local" and n < len(chosen):
                chosen = self._pick(pool, pool, n * [0], classes, bonus, track).picks.sort().values
                bonus = None
            rows, kinds = pool[chosen], None if classes is None else classes.of(chosen)
            parts = [chosen[part] for part in self._round_robin(rows, n, kinds, bonus, track)]
        if self.max_similarity is not None:
            spare = [] if ids is not None else sorted(set(range(len(pool))).difference(*map(Tensor.tolist, parts)))
            parts = deduplicate(parts, spare, pool, self.max_similarity, None if classes is None else classes.codes)
        if self.order == "central_last":
            parts = [_central_last(part, pool[part]) for part in parts]
        return Blocks([part.tolist() for part in parts], pool)

    @property
    def _local(self) -> bool:
        return self.strategy.startswith("local")

    def _number(self, available: int, given: bool) -> int:
        """Number of examples to assign to blocks."""
        size = self.block_size or 1
        if available < self.blocks * size:
            fewer, smaller = available // size, available // self.blocks
            remedies = [f"at most {fewer} blocks"] * (fewer > 0) + [f"blocks of at most {smaller}"] * (smaller > 0)
            raise ValueError(
                f"{available} examples cannot fill {self.blocks} blocks of {size}: "
                f"use {' or '.join(remedies) or f'at most {available} blocks of 1'}"
            )
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
            raise ValueError(f"balancing labels ({self.balance}) needs the labels of the examples: give them")
        return classes_of(labels, pool)

    def _bonus(self, pool: Float[Tensor, "examples dim"], queries: Embeddings | None) -> Tensor | None:
        if queries is None:
            return None
        return self.query_bonus * best_similarity(pool, unit_rows_like(queries, pool, "query"))

    def _round_robin(
        self,
        rows: Float[Tensor, "examples dim"],
        n: int,
        classes: Classes | None,
        bonus: Tensor | None,
        track: Track,
    ) -> list[Tensor]:
        """Blocks that each cover all rows. The order of turns alternates, so that no block is always last."""
        rounds = [range(self.blocks)[:: 1 if r % 2 == 0 else -1] for r in range(n // self.blocks)]
        turns = [block for order in rounds for block in order] + list(range(n % self.blocks))
        picks = self._pick(rows, rows, turns, classes, bonus, track).picks
        block_of = torch.tensor(turns, device=rows.device)
        return [picks[block_of == block] for block in range(self.blocks)]

    def _pick(
        self,
        items: Float[Tensor, "items dim"],
        pool: Float[Tensor, "examples dim"],
        turns: Sequence[int],
        classes: Classes | None,
        bonus: Tensor | None,
        track: Track,
    ) -> GreedyPicks:
        """Examples of the pool picked by each block to cover the items; `turns` lists which block picks next."""
        room = codes = quotas = None
        if classes is not None:  # the room of blocks for a class differs by at most 1
            n, blocks = len(turns), max(turns) + 1
            quotas, codes = classes.quotas(n, self.balance == "equal"), classes.codes
            kinds = torch.arange(len(quotas), device=pool.device).repeat_interleave(quotas)
            cells = torch.arange(n, device=pool.device) % blocks * len(quotas) + kinds
            room = cells.bincount(minlength=blocks * len(quotas)).view(blocks, -1)
        if self.candidates is None or len(pool) <= (count := max(self.candidates, SPARE * len(turns))):
            return round_robin_greedy(items, pool, turns, bonus=bonus, classes=codes, room=room, track=track)
        drawn = _drawn(count, len(pool), codes, quotas).to(pool.device)
        bonus, codes = (None if each is None else each[drawn] for each in (bonus, codes))
        picked = round_robin_greedy(items, pool[drawn], turns, bonus=bonus, classes=codes, room=room, track=track)
        return picked._replace(picks=drawn[picked.picks])

    def _from_regions(self, rows: Float[Tensor, "examples dim"], bonus: Tensor | None, track: Track) -> list[Tensor]:
        """Blocks, each from one region."""
        anchors = self._pick(rows, rows, self.blocks * [0], None, None, track).picks
        similarity = rounded(rows @ rows[anchors].T).clamp(min=0)
        blocks: list[Tensor] = []
        for b, region in enumerate(_regions(similarity, anchors.tolist())):
            size = self.block_size or len(region)
            inside = torch.tensor(region, device=rows.device)
            if self.strategy == "local_diverse":
                own_bonus = None if bonus is None else bonus[inside]
                best = self._pick(rows[inside], rows[inside], size * [0], None, own_bonus, silent).picks
            else:
                nearest = similarity[inside, b].masked_fill(inside == anchors[b], torch.inf)
                best = nearest.sort(descending=True, stable=True).indices[:size]
            blocks.append(inside[best])
        return blocks


class Selection(NamedTuple):
    """Result of `SubCP.select`.

    Attributes:
        ids: Selected examples in the order of picking. Without `balance`, the first k are the selection of k.
        gains: Gain of each pick: the increase of coverage times the number of examples, plus its query bonus.
        coverage: Mean similarity of the pool's examples to the nearest selected one, 0 to 1. With `represent`, the
            similarity of the represented items as a fraction of the similarity that the whole pool reaches.
    """

    ids: Int[Tensor, "n"]
    gains: Float[Tensor, "n"]
    coverage: float

    @property
    def saturated_at(self) -> int:
        """Number of picks with a positive gain; later picks are the first free examples."""
        return int((self.gains > 0).sum())


def _distinct(ids: Sequence[int] | Tensor, examples: int) -> Int[Tensor, "chosen"]:
    """The ids in ascending order, so that ties go to the smaller index."""
    chosen = torch.as_tensor(ids).sort().values
    if chosen.ndim != 1 or not len(chosen) or chosen[0] < 0 or chosen[-1] >= examples:
        raise ValueError(f"ids must be a list of numbers from 0 to {examples - 1}, not {chosen.tolist()}")
    if len(twice := chosen[1:][chosen[1:] == chosen[:-1]]):
        raise ValueError(f"example {int(twice[0])} is in ids twice: give each example once")
    return chosen


def _drawn(
    count: int, examples: int, codes: Int[Tensor, "examples"] | None, quotas: Int[Tensor, "classes"] | None
) -> Int[Tensor, "drawn"]:
    """Random examples in ascending order, `count` of them and enough of each class for its quota."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(0))
    keep = torch.arange(examples) < count
    if codes is not None and quotas is not None:
        drawn = codes.cpu()[order]
        by_class, sizes = drawn.argsort(stable=True), drawn.bincount(minlength=len(quotas))
        place = torch.empty_like(order)  # of each example among those of its class
        place[by_class] = torch.arange(examples) - (sizes.cumsum(0) - sizes)[drawn[by_class]]
        keep |= place < SPARE * quotas.cpu()[drawn]
    return order[keep].sort().values


def _central_last(part: Int[Tensor, "block"], rows: Float[Tensor, "block dim"]) -> Int[Tensor, "block"]:
    central = rounded(rows @ rows.mean(0)).argmax()
    return torch.cat([part[torch.arange(len(part), device=part.device) != central], part[central][None]])


def _regions(similarity: Float[Tensor, "examples blocks"], anchors: list[int]) -> list[list[int]]:
    """Examples of each anchor's region: each example joins its nearest anchor with room, most similar first.

    Regions have equal sizes; if the number of examples is not a multiple, the first full regions take one more.
    """
    preferred = similarity.sort(dim=1, descending=True, stable=True).indices.tolist()
    surest = similarity.amax(1).sort(descending=True, stable=True).indices.tolist()
    room, more = divmod(len(similarity), len(anchors))
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
