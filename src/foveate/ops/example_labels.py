"""Labels of examples as numbers, and how many of each go into a choice."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Classes", "classes_of"]


class Classes(NamedTuple):
    """Labels as numbers: `codes` of the examples, and the `names` that the codes count."""

    codes: Int[Tensor, "examples"]
    names: list[Hashable]

    def of(self, chosen: Int[Tensor, "chosen"]) -> "Classes":
        """Those of some examples."""
        return self._replace(codes=self.codes[chosen])

    def quotas(self, n: int, equal: bool) -> Int[Tensor, "classes"]:
        """How many of each class go into a choice of n, by largest remainder."""
        counts = self.codes.bincount(minlength=len(self.names))
        if n == len(self.codes):
            return counts
        shares = (counts > 0).long() if equal else counts
        quotas, rest = n * shares // shares.sum(), n * shares % shares.sum()
        quotas[rest.sort(descending=True, stable=True).indices[: n - int(quotas.sum())]] += 1
        for name, has, needed in zip(self.names, counts.tolist(), quotas.tolist(), strict=True):
            if has < needed:
                raise ValueError(
                    f"class {name!r} has {has} examples, and {needed} are needed: "
                    'choose fewer in all, or use balance="proportional"'
                )
        return quotas


def classes_of(labels: Sequence[Hashable], pool: Float[Tensor, "examples dim"]) -> Classes:
    """The labels of a pool as numbers, on its device.

    Raises:
        ValueError: If there is not one for each example.
    """
    if len(labels) != len(pool):
        raise ValueError(f"there are {len(labels)} labels for {len(pool)} examples: give one for each")
    if isinstance(labels, Tensor):
        labels = labels.tolist()  # tensors are equal to themselves alone
    names = sorted(set(labels), key=str)
    place = {name: index for index, name in enumerate(names)}
    return Classes(torch.tensor([place[label] for label in labels], device=pool.device), names)
