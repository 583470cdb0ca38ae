"""Labels of examples as class numbers, and quotas of each class."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Classes", "classes_of"]


class Classes(NamedTuple):
    """Labels as numbers.

    Attributes:
        codes: Class of each example, an index into `names`.
        names: Distinct labels.
    """

    codes: Int[Tensor, "examples"]
    names: list[Hashable]

    def of(self, chosen: Int[Tensor, "chosen"]) -> "Classes":
        """The classes of some of the examples."""
        return self._replace(codes=self.codes[chosen])

    def quotas(self, n: int, equal: bool) -> Int[Tensor, "classes"]:
        """Number of examples of each class in a selection of `n`, by largest remainder.

        Args:
            n: Number of examples to select.
            equal: Equally many of each class, instead of the proportions of the pool.

        Raises:
            ValueError: If a class has too few examples.
        """
        counts = self.codes.bincount(minlength=len(self.names))
        if n == len(self.codes):
            return counts
        shares = (counts > 0).long() if equal else counts
        quotas, rest = n * shares // shares.sum(), n * shares % shares.sum()
        quotas[rest.sort(descending=True, stable=True).indices[: n - int(quotas.sum())]] += 1
        for name, has, needed in zip(self.names, counts.tolist(), quotas.tolist(), strict=True):
            if has < needed:
                raise ValueError(
                    f"label {name!r} has {has} examples, and {needed} are needed: "
                    "select fewer examples, or balance them in proportion to the pool"
                )
        return quotas


def classes_of(labels: Sequence[Hashable], pool: Float[Tensor, "examples dim"]) -> Classes:
    """The labels of a pool as numbers, on its device.

    Raises:
        ValueError: If their number is not that of the examples.
    """
    if len(labels) != len(pool):
        raise ValueError(f"there are {len(labels)} labels for {len(pool)} examples: give one for each")
    if isinstance(labels, Tensor):
        labels = labels.tolist()  # tensors hash by identity
    names = sorted(set(labels), key=str)
    code = {name: index for index, name in enumerate(names)}
    return Classes(torch.tensor([code[label] for label in labels], device=pool.device), names)
