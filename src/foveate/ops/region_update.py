"""What became of merged tokens, spread over all tokens: the end of a run of merged blocks."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch, region_matmul

__all__ = ["plus", "region_update"]


def region_update(
    weights: Sequence[Float[Tensor, "plans _ _ _"]],
    x: Float[Tensor, "batch all dim"],
    before: Float[Tensor, "batch fewer dim"],
    after: Float[Tensor, "batch fewer dim"],
    order: Int[Tensor, "all"] | None = None,
) -> Float[Tensor, "batch all dim"]:
    """x, to which every region of ``after - before`` is added, times its matrix.

    Args:
        weights: For each group of regions of one shape [plans, regions, rows, tokens]: one set of matrices for each
            sample, or one for all.
        x: All tokens; of a region there are `rows`.
        before: Merged tokens, `tokens` of a region side by side.
        after: What became of them.
        order: Which token of x each row of the products is added to. None: they stand as those of x do.

    Examples:
        >>> twice = [torch.ones(1, 2, 2, 1)]  # to both tokens of a pair
        >>> x, before, after = torch.zeros(1, 4, 1), torch.zeros(1, 2, 1), torch.tensor([[[1.0], [2.0]]])
        >>> region_update(twice, x, before, after, torch.tensor([0, 2, 1, 3])).flatten().tolist()
        [1.0, 2.0, 1.0, 2.0]
    """
    size = max(side for matrices in weights for side in matrices.shape[2:])
    backend = dispatch.choose("region_update", x.device, torch.promote_types(x.dtype, after.dtype), size)
    return backend.run(weights, x, before, after, order)


@dispatch.register("region_update", "portable")
def portable(weights: Sequence[Tensor], x: Tensor, before: Tensor, after: Tensor, order: Tensor | None) -> Tensor:
    """`region_update` in plain PyTorch."""
    parts = (after - before).split([matrices.shape[1] * matrices.shape[3] for matrices in weights], 1)
    added = [region_matmul.portable(*both, 0) for both in zip(weights, parts, strict=True)]
    return plus(x, added[0] if len(added) == 1 else torch.cat(added, 1), order)


def plus(
    x: Float[Tensor, "batch all dim"], added: Float[Tensor, "batch all dim"], order: Int[Tensor, "all"] | None
) -> Float[Tensor, "batch all dim"]:
    """x, to whose token ``order[i]`` the token i of the other is added."""
    if order is None:
        return x + added
    dtype = torch.promote_types(x.dtype, added.dtype)  # they differ under autocast
    return x.to(dtype).index_add(1, order, added.to(dtype))


dispatch.register_kernels("region_update", "merging")
