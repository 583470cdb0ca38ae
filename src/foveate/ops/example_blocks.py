"""Blocks of examples for in-context learning, and what they are like."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from foveate.ops.example_labels import classes_of
from foveate.ops.facility_location import best_similarity

__all__ = ["ALIKE", "Blocks", "Embeddings", "Report", "like", "unit_rows"]

Embeddings = Tensor | npt.NDArray[np.number] | Sequence[Sequence[float]]
ALIKE = 1e5  # similarities and embeddings are equal if they are after rounding to so many parts of 1


class Report(NamedTuple):
    """What blocks are like. Coverage is of the pool, from 0 to 1; similarities are mean cosines, 0 without a pair.

    Attributes:
        worst_coverage: Of the block that covers the pool least.
        mean_coverage: Of a block.
        union_coverage: Of all blocks together.
        inside: Similarity of two examples of one block.
        between: Similarity of two examples of different blocks.
        duplicates: Chosen examples that equal one before them.
        label_distance: Total variation between the labels of a block and those of the pool, mean; None without labels.
        missing: Labels of the pool that a block does not have, mean; None without labels.
    """

    worst_coverage: float
    mean_coverage: float
    union_coverage: float
    inside: float
    between: float
    duplicates: int
    label_distance: float | None = None
    missing: float | None = None


class Blocks(NamedTuple):
    """A partition.

    Attributes:
        ids: Indices into the pool, a list for each block, in the order in which they are to be read.
        pool: Unit embeddings of the pool.
    """

    ids: list[list[int]]
    pool: Float[Tensor, "examples dim"]

    def report(self, labels: Sequence[Hashable] | None = None) -> Report:
        """What the blocks are like; with the labels of the pool, how balanced they are."""
        rows = [self.pool[block] for block in self.ids]
        served = torch.stack([best_similarity(self.pool, block) for block in rows])
        coverage, chosen = served.mean(1), torch.cat(rows)
        sums = torch.stack([block.sum(0) for block in rows])
        within = float(sums.square().sum()) - len(chosen)  # of all ordered pairs
        pairs = sum(len(block) * (len(block) - 1) for block in rows)
        across = float(sums.sum(0).square().sum() - sums.square().sum())
        others = len(chosen) ** 2 - len(chosen) - pairs
        distinct = len((chosen * ALIKE).round().unique(dim=0))
        distance = missing = None
        if labels is not None:
            distance, missing = self._balance(labels)
        return Report(
            float(coverage.min()),
            float(coverage.mean()),
            float(served.amax(0).mean()),
            within / pairs if pairs else 0.0,
            across / others if others else 0.0,
            len(chosen) - distinct,
            distance,
            missing,
        )

    def weights(
        self, query: Sequence[float] | Float[Tensor, "*queries dim"], temperature: float = 0.1
    ) -> Float[Tensor, "blocks *queries"]:
        """What each block is to count for a query, in all 1: softmax of its best cosine over the temperature.

        Raises:
            ValueError: If a query is NaN, infinite or 0, or of other dims than the pool.
        """
        asked = torch.as_tensor(query)
        near = like(torch.atleast_2d(asked), self.pool, "query") @ self.pool.T
        best = torch.stack([near[:, block].amax(1) for block in self.ids])
        return (best / temperature).softmax(0).view(-1, *asked.shape[:-1])

    def _balance(self, labels: Sequence[Hashable]) -> tuple[float, float]:
        codes = classes_of(labels, self.pool).codes
        share = codes.bincount() / len(codes)
        counts = torch.stack([codes[block].bincount(minlength=len(share)) for block in self.ids])
        distance = (counts / counts.sum(1, keepdim=True) - share).abs().sum(1) / 2
        return float(distance.mean()), float((counts == 0).sum(1).float().mean())


def unit_rows(embeddings: Embeddings, what: str = "example") -> Float[Tensor, "rows dim"]:
    """Embeddings of length 1, in float32 or float64.

    Raises:
        ValueError: If they are not [rows, dim], or one is NaN, infinite or 0; it names the first.
    """
    rows = torch.as_tensor(embeddings).detach()
    if rows.ndim != 2 or not rows.numel():
        raise ValueError(
            f"embeddings must be [rows, dim], a row for each {what} and one at least, not {list(rows.shape)}"
        )
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    for wrong, name in ((~rows.isfinite().all(1), "NaN or infinite"), ((rows == 0).all(1), "0")):
        if wrong.any():
            raise ValueError(f"the embedding of {what} {int(wrong.int().argmax())} is {name}: leave it out or mend it")
    return normalize(rows / rows.abs().amax(1, keepdim=True), dim=1)


def like(embeddings: Embeddings, pool: Float[Tensor, "examples dim"], what: str) -> Float[Tensor, "rows dim"]:
    """`unit_rows` of the pool's dims, dtype and device.

    Raises:
        ValueError: As `unit_rows` does, and if they have other dims.
    """
    rows = unit_rows(embeddings, what)
    if rows.shape[1] != pool.shape[1]:
        raise ValueError(
            f"the embedding of a {what} has {rows.shape[1]} dims and that of an example {pool.shape[1]}: "
            "make both with the same model"
        )
    return rows.to(pool)
