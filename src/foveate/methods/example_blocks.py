"""Blocks of examples for in-context learning, with statistics and per-query weights, and the labels of examples."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops.facility_location import best_similarity

__all__ = ["Blocks", "Classes", "Embeddings", "Report", "classes_of", "rounded", "unit_rows", "unit_rows_like"]

Embeddings = Tensor | npt.NDArray[np.number] | Sequence[Sequence[float]]


class Report(NamedTuple):
    """Statistics of blocks.

    The coverage of a set is the mean, over the examples of the pool, of the largest max(0, cosine) with an example of
    the set: 0 to 1.

    Attributes:
        worst_coverage: Smallest coverage of a block.
        mean_coverage: Mean coverage of the blocks.
        union_coverage: Coverage of all blocks together.
        inside: Mean cosine of two examples of the same block; 0 without a pair.
        between: Mean cosine of two examples of different blocks; 0 without a pair.
        duplicates: Number of chosen examples that equal an earlier one.
        label_distance: Mean total variation distance between the label distributions of a block and of the pool; None
            without labels.
        missing: Mean number of the pool's labels that are missing from a block; None without labels.
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
    """Disjoint blocks of examples.

    Attributes:
        ids: Indices into the pool, one list for each block, in reading order.
        pool: Embeddings of the pool, scaled to unit length.
    """

    ids: list[list[int]]
    pool: Float[Tensor, "examples dim"]

    def report(self, labels: Sequence[Hashable] | None = None) -> Report:
        """Statistics of the blocks; given the labels of the pool, also their label balance."""
        rows = [self.pool[block] for block in self.ids]
        served = torch.stack([best_similarity(self.pool, block) for block in rows])
        coverage, chosen = served.mean(1), torch.cat(rows)
        sums = torch.stack([block.sum(0) for block in rows])
        within = float(sums.square().sum()) - len(chosen)  # sum over ordered pairs
        pairs = sum(len(block) * (len(block) - 1) for block in rows)
        across = float(sums.sum(0).square().sum() - sums.square().sum())
        others = len(chosen) ** 2 - len(chosen) - pairs
        distinct = len(rounded(chosen).unique(dim=0))
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

    def lost(self, labels: Sequence[Hashable]) -> dict[Hashable, int]:
        """Labels of the pool that no block has, with their numbers of examples; most frequent first."""
        pool = Counter(labels)
        for label in {labels[i] for block in self.ids for i in block}:
            del pool[label]
        return dict(pool.most_common())

    def weights(
        self, query: Sequence[float] | Float[Tensor, "*queries dim"], temperature: float = 0.1
    ) -> Float[Tensor, "blocks *queries"]:
        """Weight of each block for each query: softmax over blocks of the largest cosine / temperature.

        Raises:
            ValueError: If a query is NaN, infinite or 0, or its dim differs from the pool's.
        """
        queries = torch.as_tensor(query)
        near = unit_rows_like(torch.atleast_2d(queries), self.pool, "query") @ self.pool.T
        best = torch.stack([near[:, block].amax(1) for block in self.ids])
        return (best / temperature).softmax(0).view(-1, *queries.shape[:-1])

    def _balance(self, labels: Sequence[Hashable]) -> tuple[float, float]:
        codes = classes_of(labels, self.pool).codes
        share = codes.bincount() / len(codes)
        counts = torch.stack([codes[block].bincount(minlength=len(share)) for block in self.ids])
        distance = (counts / counts.sum(1, keepdim=True) - share).abs().sum(1) / 2
        return float(distance.mean()), float((counts == 0).sum(1).float().mean())


def unit_rows(embeddings: Embeddings, what: str = "example") -> Float[Tensor, "rows dim"]:
    """Embeddings scaled to unit length, in float32 or float64.

    Raises:
        ValueError: If they are not [rows, dim], or one is NaN, infinite or 0.
    """
    rows = torch.as_tensor(embeddings).detach()
    if rows.ndim != 2 or not rows.numel():
        raise ValueError(
            f"embeddings must be [rows, dim], a row for each {what} and at least one, not {list(rows.shape)}"
        )
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = torch.maximum(rows.amax(1), -rows.amin(1))  # NaN if a number is; needs no second copy of the rows
    for wrong, name in ((~largest.isfinite(), "NaN or infinite"), (largest == 0, "0")):
        if wrong.any():
            raise ValueError(
                f"the embedding of {what} {int(wrong.int().argmax())} is {name}: leave it out or correct it"
            )
    rows = rows / largest[:, None]
    return rows.div_(rows.norm(dim=1, keepdim=True))


def unit_rows_like(
    embeddings: Embeddings, pool: Float[Tensor, "examples dim"], what: str
) -> Float[Tensor, "rows dim"]:
    """`unit_rows` in the pool's dtype and on its device.

    Raises:
        ValueError: As `unit_rows`, and if the dim differs from the pool's.
    """
    rows = unit_rows(embeddings, what)
    if rows.shape[1] != pool.shape[1]:
        raise ValueError(
            f"the embedding of a {what} has {rows.shape[1]} dims, but examples have {pool.shape[1]}: "
            "make both with the same model"
        )
    return rows.to(pool)


def rounded(similarity: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Similarities in units of 1e-5, rounded so that comparisons do not depend on rounding errors."""
    return (similarity * 1e5).round()


# --- labels ---


class Classes(NamedTuple):
    """Labels as numbers.

    Attributes:
        codes: Class of each example, an index into `names`.
        names: Distinct labels.
    """

    codes: Int[Tensor, "examples"]
    names: list[Hashable]

    def of(self, chosen: Int[Tensor, "chosen"]) -> "Classes":
        """Classes of the chosen examples."""
        return self._replace(codes=self.codes[chosen])

    def quotas(self, n: int, equal: bool) -> Int[Tensor, "classes"]:
        """Number of examples of each class in a selection of `n`, by largest remainder; at least one if there is room.

        Args:
            n: Number of examples to select.
            equal: Use equal class sizes instead of the pool's proportions.

        Raises:
            ValueError: If a class has too few examples.
        """
        counts = self.codes.bincount(minlength=len(self.names))
        if n == len(self.codes):
            return counts
        shares = (counts > 0).long() if equal else counts
        quotas, rest = n * shares // shares.sum(), n * shares % shares.sum()
        quotas[rest.sort(descending=True, stable=True).indices[: n - int(quotas.sum())]] += 1
        for none in ((quotas == 0) & (counts > 0)).nonzero() if n >= len(quotas) else ():
            quotas[quotas.argmax()] -= 1
            quotas[none] = 1
        for name, has, needed in zip(self.names, counts.tolist(), quotas.tolist(), strict=True):
            if has < needed:
                raise ValueError(
                    f"label {name!r} has {has} examples, and {needed} are needed: "
                    "select fewer examples, or balance them in proportion to the pool"
                )
        return quotas


def classes_of(labels: Sequence[Hashable], pool: Float[Tensor, "examples dim"]) -> Classes:
    """Labels of a pool as numbers, on its device.

    Raises:
        ValueError: If labels and examples differ in number.
    """
    if len(labels) != len(pool):
        raise ValueError(f"there are {len(labels)} labels for {len(pool)} examples: give one for each")
    if isinstance(labels, Tensor):
        labels = labels.tolist()  # tensors hash by identity
    names = sorted(set(labels), key=str)
    code = {name: index for index, name in enumerate(names)}
    return Classes(torch.tensor([code[label] for label in labels], device=pool.device), names)
