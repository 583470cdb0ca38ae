"""Small matrix products for regions of consecutive tokens: merging, and adding unmerged changes to all tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["add_tokens", "region_matmul", "region_update"]


def region_matmul(
    weights: Float[Tensor, "plans regions rows tokens"],
    x: Float[Tensor, "batch all dim"],
    text: int = 0,
    order: Int[Tensor, "taken"] | None = None,
) -> Float[Tensor, "batch fewer dim"]:
    """Product of each region of x with its matrix, which turns `tokens` tokens into `rows` tokens.

    Args:
        weights: Matrices of each region; `plans` is the batch size, or 1 for matrices shared by all samples.
        x: Tokens [batch, text + regions * tokens, dim]; tokens of a region are consecutive.
        text: Number of leading text tokens, which are copied unchanged.
        order: Permutation of x before the product, as ``x[:, order]``.

    Returns:
        Tokens [batch, text + regions * rows, dim].

    Examples:
        >>> means = torch.full((1, 3, 1, 2), 0.5)  # of pairs
        >>> region_matmul(means, torch.arange(7.0)[None, :, None], text=1).flatten().tolist()
        [0.0, 1.5, 3.5, 5.5]
    """
    backend = dispatch.choose("region_matmul", x.device, x.dtype, max(weights.shape[2:]))
    return backend.run(weights, x, text, order)


@dispatch.register("region_matmul", "portable")
def portable(weights: Tensor, x: Tensor, text: int, order: Tensor | None = None) -> Tensor:
    """`region_matmul` in plain PyTorch."""
    x = x if order is None else x.index_select(1, order)
    regions = x[:, text:].unflatten(1, (weights.shape[1], weights.shape[3]))
    y = (weights @ regions).flatten(1, 2)
    return torch.cat([x[:, :text], y], 1) if text else y


def region_update(
    weights: Sequence[Float[Tensor, "plans _ _ _"]],
    x: Float[Tensor, "batch all dim"],
    before: Float[Tensor, "batch fewer dim"],
    after: Float[Tensor, "batch fewer dim"],
    order: Int[Tensor, "all"] | None = None,
) -> Float[Tensor, "batch all dim"]:
    """Tokens `x` plus the product of each region's matrix with ``after - before``.

    Args:
        weights: Matrices of each group of regions of one shape [plans, regions, rows, tokens]; `plans` is the batch
            size or 1.
        x: All tokens; a region has `rows` of them.
        before: Merged tokens before the layers; a region has `tokens` consecutive merged tokens.
        after: Merged tokens after the layers.
        order: Token index to add each row of the products to. None adds row i to token i.

    Examples:
        >>> both = [torch.ones(1, 2, 2, 1)]  # both tokens of a pair take the change of its merged token
        >>> x, before, after = torch.zeros(1, 4, 1), torch.zeros(1, 2, 1), torch.tensor([[[1.0], [2.0]]])
        >>> region_update(both, x, before, after, torch.tensor([0, 2, 1, 3])).flatten().tolist()
        [1.0, 2.0, 1.0, 2.0]
    """
    size = max(side for matrices in weights for side in matrices.shape[2:])
    backend = dispatch.choose("region_update", x.device, torch.promote_types(x.dtype, after.dtype), size)
    return backend.run(weights, x, before, after, order)


@dispatch.register("region_update", "portable")
def portable_update(
    weights: Sequence[Tensor], x: Tensor, before: Tensor, after: Tensor, order: Tensor | None
) -> Tensor:
    """`region_update` in plain PyTorch."""
    parts = (after - before).split([matrices.shape[1] * matrices.shape[3] for matrices in weights], 1)
    added = [portable(*both, 0) for both in zip(weights, parts, strict=True)]
    return add_tokens(x, added[0] if len(added) == 1 else torch.cat(added, 1), order)


def add_tokens(
    x: Float[Tensor, "batch all dim"], added: Float[Tensor, "batch all dim"], order: Int[Tensor, "all"] | None
) -> Float[Tensor, "batch all dim"]:
    """Tokens `x` with row i of `added` added to token ``order[i]``, or to token i if the order is None."""
    if order is None:
        return x + added
    dtype = torch.promote_types(x.dtype, added.dtype)  # they differ under autocast
    return x.to(dtype).index_add(1, order, added.to(dtype))


dispatch.register_kernels("region_matmul", "merging")
dispatch.register_kernels("region_update", "merging")
