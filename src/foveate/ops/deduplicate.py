"""Blocks without copies: examples that are too much alike are exchanged until no block holds two of them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops.example_blocks import ALIKE

__all__ = ["keep_apart"]


def keep_apart(
    blocks: Sequence[Int[Tensor, "block"]],
    spare: Sequence[int],
    pool: Float[Tensor, "examples dim"],
    most: float,
    classes: Int[Tensor, "examples"] | None = None,
) -> list[Int[Tensor, "block"]]:
    """The blocks after exchanges, so that the cosine of no two examples of one is above `most`.

    An example that is too much like another of its block changes places with the one most like it for which that
    leaves fewer such pairs in all; later examples of a block go before earlier ones.

    Args:
        blocks: Examples of each.
        spare: Examples of no block, which may come in.
        pool: Unit rows.
        most: The largest cosine within a block.
        classes: Of the examples; only those of the same change places.

    Raises:
        ValueError: If such pairs remain.
    """
    seats = _Seats([*(block.tolist() for block in blocks), list(spare)], pool, most)
    kinds = torch.zeros_like(seats.home) if classes is None else classes
    exchanged = True
    while exchanged:
        exchanged = False
        for part in seats.parts[:-1]:
            for here in reversed(part[:]):
                exchanged |= bool(seats.pairs[here] > 0) and seats.exchange(here, kinds)
    if left := int(seats.pairs.sum()) // 2:
        raise ValueError(
            f"max_similarity={most} cannot be met: pairs of a block that are more alike, and that no exchange parts: "
            f"{left}; use more blocks, fewer examples or a larger max_similarity"
        )
    return [torch.tensor(part, device=pool.device) for part in seats.parts[:-1]]


class _Seats:
    """Who is where: blocks, and last the examples of none, among whom nobody is too much like another."""

    def __init__(self, parts: list[list[int]], pool: Float[Tensor, "examples dim"], most: float) -> None:
        self.parts, self.pool, self.limit = parts, pool, round(most * ALIKE)
        self.home = torch.full((len(pool),), -1, device=pool.device)  # -1: takes no part
        self.pairs = torch.zeros_like(self.home)  # of each example with others of its block
        for number, part in enumerate(parts):
            self.home[part] = number
            self._count(number)

    def exchange(self, here: int, kinds: Int[Tensor, "examples"]) -> bool:
        """Let it change places with the example most like it that leaves fewer pairs, if there is one."""
        number, none = int(self.home[here]), len(self.parts) - 1
        similar = (self.pool @ self.pool[here] * ALIKE).round()
        like = (similar > self.limit).long()
        others = [example for example in self.parts[number] if example != here]
        theirs = self._too_like(self.pool, others).sum(1)
        crowd = torch.zeros(none + 1, dtype=torch.long, device=like.device).index_add(0, self.home.clamp(min=0), like)
        mine = torch.where(self.home == none, 0, crowd[self.home] - like)
        may = (theirs + mine < self.pairs + self.pairs[here]) & (kinds == kinds[here])
        may &= (self.home >= 0) & (self.home != number)
        if not may.any():
            return False
        there = int(similar.masked_fill(~may, -torch.inf).argmax())
        other = int(self.home[there])
        for part, old, new in ((self.parts[number], here, there), (self.parts[other], there, here)):
            part[part.index(old)] = new
        self.home[[here, there]] = self.home[[there, here]]
        self._count(number)
        self._count(other)
        return True

    def _count(self, number: int) -> None:
        part = self.parts[number]
        apart = number == len(self.parts) - 1
        self.pairs[part] = 0 if apart else self._too_like(self.pool[part], part).sum(1) - 1

    def _too_like(self, rows: Float[Tensor, "rows dim"], others: list[int]) -> Int[Tensor, "rows others"]:
        return ((rows @ self.pool[others].T * ALIKE).round() > self.limit).long()
