"""Exchange of near-duplicate examples between blocks, until no block holds two examples that are too similar."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.methods.example_blocks import rounded

__all__ = ["deduplicate"]


def deduplicate(
    blocks: Sequence[Int[Tensor, "block"]],
    spare: Sequence[int],
    pool: Float[Tensor, "examples dim"],
    max_similarity: float,
    classes: Int[Tensor, "examples"] | None = None,
) -> list[Int[Tensor, "block"]]:
    """Exchange examples until no two examples of a block have a cosine above `max_similarity`.

    An example too similar to another one of its block changes places with the most similar example elsewhere that
    reduces the number of too similar pairs. Later examples of a block are exchanged first. The search is greedy, one
    exchange at a time, and may miss a solution.

    Args:
        blocks: Indices of the examples of each block.
        spare: Indices of examples in no block, which may be exchanged into one.
        pool: Embeddings of unit length.
        max_similarity: Largest cosine allowed within a block.
        classes: Class of each example. Only examples of the same class change places. None allows all exchanges.

    Raises:
        ValueError: If too similar pairs remain.
    """
    state = _Exchange([*(block.tolist() for block in blocks), list(spare)], pool, max_similarity, classes)
    exchanged = True
    while exchanged:
        exchanged = False
        for part in state.parts[:-1]:
            for example in reversed(part[:]):
                exchanged |= bool(state.pairs[example] > 0) and state.exchange(example)
    if left := int(state.pairs.sum()) // 2:
        raise ValueError(
            f"a largest similarity of {max_similarity} cannot be met: pairs of a block that are more similar, and "
            f"that no exchange separates: {left}; use more blocks, fewer examples or a larger similarity"
        )
    return [torch.tensor(part, device=pool.device) for part in state.parts[:-1]]


class _Exchange:
    """Examples in parts: the blocks and, last, the spare examples, whose similarity is not limited."""

    def __init__(
        self,
        parts: list[list[int]],
        pool: Float[Tensor, "examples dim"],
        max_similarity: float,
        classes: Int[Tensor, "examples"] | None,
    ) -> None:
        self.parts, self.pool = parts, pool
        self.limit = rounded(torch.tensor(max_similarity, dtype=torch.float64)).item()
        self.part_of = torch.full((len(pool),), -1, device=pool.device)  # -1: takes no part
        self.classes = torch.zeros_like(self.part_of) if classes is None else classes
        self.pairs = torch.zeros_like(self.part_of)  # number of too similar examples in the same block
        for number, part in enumerate(parts):
            self.part_of[part] = number
            self._count(number)

    def exchange(self, example: int) -> bool:
        """Exchange an example for the most similar one that leaves fewer pairs. False if there is none."""
        number, spare = int(self.part_of[example]), len(self.parts) - 1
        similarity = rounded(self.pool @ self.pool[example])
        too_similar = (similarity > self.limit).long()
        # pairs of every other example in this block, and of this example in every other block
        theirs = self._too_similar(self.pool, [other for other in self.parts[number] if other != example]).sum(1)
        by_part = too_similar.new_zeros(spare + 1).index_add(0, self.part_of.clamp(min=0), too_similar)
        ours = torch.where(self.part_of == spare, 0, by_part[self.part_of] - too_similar)
        allowed = (theirs + ours < self.pairs + self.pairs[example]) & (self.classes == self.classes[example])
        allowed &= (self.part_of >= 0) & (self.part_of != number)
        if not allowed.any():
            return False
        other = int(similarity.masked_fill(~allowed, -torch.inf).argmax())
        target = int(self.part_of[other])
        for part, old, new in ((self.parts[number], example, other), (self.parts[target], other, example)):
            part[part.index(old)] = new
        self.part_of[[example, other]] = self.part_of[[other, example]]
        self._count(number)
        self._count(target)
        return True

    def _count(self, number: int) -> None:
        part = self.parts[number]
        is_spare = number == len(self.parts) - 1
        self.pairs[part] = 0 if is_spare else self._too_similar(self.pool[part], part).sum(1) - 1

    def _too_similar(self, rows: Float[Tensor, "rows dim"], others: list[int]) -> Int[Tensor, "rows others"]:
        return (rounded(rows @ self.pool[others].T) > self.limit).long()
