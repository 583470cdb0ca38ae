"""One small matrix product for each region of consecutive tokens: merging and unmerging."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["region_matmul"]


def region_matmul(
    weights: Float[Tensor, "plans regions rows tokens"],
    x: Float[Tensor, "batch all dim"],
    text: int = 0,
    order: Int[Tensor, "taken"] | None = None,
) -> Float[Tensor, "batch fewer dim"]:
    """The product of each region of x with its matrix, which turns `tokens` tokens into `rows` tokens.

    Args:
        weights: Matrices of each region; `plans` is the batch size, or 1 for matrices that all samples share.
        x: Tokens [batch, text + regions * tokens, dim]; those of a region are consecutive.
        text: Number of leading text tokens, which are copied unchanged.
        order: Permutation that is applied to x first, as ``x[:, order]``.

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


dispatch.register_kernels("region_matmul", "merging")
