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

    Of two that are too much alike the later one, or else the earlier, changes places with the example most like it
    for which that puts both where nothing is too much like them. Exchanges that help only together are not looked for.

    Args:
        blocks: Examples of each.
        spare: Examples of no block, which may come in.
        pool: Unit rows.
        most: The largest cosine within a block.
        classes: Of the examples; only those of the same change places.

    Raises:
        ValueError: If pairs remain that are too much alike.
    """
    parts = [*(block.tolist() for block in blocks), list(spare)]
    home = torch.full((len(pool),), -1, device=pool.device)
    for number, part in enumerate(parts):
        home[part] = number
    left = 0
    for part in parts[:-1]:
        for seat in reversed(range(len(part))):
            if not len(_too_like(pool, part, seat, most)):
                continue
            other = _partner(pool, home, part, part[seat], most, classes, spare=len(blocks))
            if other is None:
                continue
            theirs = parts[int(home[other])]
            there, here = theirs.index(other), part[seat]
            part[seat], theirs[there] = other, here
            home[[here, other]] = home[[other, here]]
        left += sum(len(_too_like(pool, part[: seat + 1], seat, most)) for seat in range(len(part)))
    if left:
        raise ValueError(
            f"max_similarity={most} cannot be met: pairs in one block that are more alike, and that no exchange parts: "
            f"{left}; use more blocks, fewer examples or a larger max_similarity"
        )
    return [torch.tensor(part, device=pool.device) for part in parts[:-1]]


def _too_like(pool: Float[Tensor, "examples dim"], part: list[int], seat: int, most: float) -> Int[Tensor, "pairs"]:
    """Seats of the examples of a block that are too much like the one of this seat."""
    similar = pool[part] @ pool[part[seat]]
    similar[seat] = -1
    return _above(similar, most).nonzero()[:, 0]


def _partner(
    pool: Float[Tensor, "examples dim"],
    home: Int[Tensor, "examples"],
    part: list[int],
    here: int,
    most: float,
    classes: Int[Tensor, "examples"] | None,
    spare: int,
) -> int | None:
    """The example most like this one of a block with which it may change places; `spare` is home to those of none."""
    similar = pool @ pool[here]
    others = [example for example in part if example != here]
    fits_here = ~_above(pool @ pool[others].T, most).any(1)
    like = _above(similar, most)
    crowd = torch.bincount(home[like & (home >= 0)], minlength=spare + 1)
    fits_there = (crowd[home] - like.int() == 0) | (home == spare)
    may = fits_here & fits_there & (home >= 0) & (home != home[here])
    if classes is not None:
        may &= classes == classes[here]
    if not may.any():
        return None
    return int((similar * ALIKE).round().masked_fill(~may, -torch.inf).argmax())


def _above(similar: Tensor, most: float) -> Tensor:
    return (similar * ALIKE).round() > round(most * ALIKE)
