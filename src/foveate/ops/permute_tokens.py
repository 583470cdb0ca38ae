"""Reordering of queries, keys and values, with the rotary embedding in the same pass."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["permute_tokens"]

Rope = tuple[Float[Tensor, "*batch tokens dim"], Float[Tensor, "*batch tokens dim"]]


def permute_tokens(
    *tensors: Float[Tensor, "batch tokens heads dim"],
    order: Int[Tensor, "taken"] | None = None,
    rope: Rope | None = None,
) -> tuple[Float[Tensor, "batch taken heads dim"], ...]:
    """Tokens ``x[:, order]`` of each tensor, after rotation of the first two, queries and keys.

    On an NVIDIA GPU this is one kernel, unless gradients are needed.

    Args:
        tensors: One to three tensors.
        order: Tokens to take; None takes all tokens in their order.
        rope: (cos, sin) of each token before the permutation. Channels 2i and 2i + 1 form a pair, as in FLUX.

    Examples:
        >>> x = torch.arange(3.0).view(1, 3, 1, 1)
        >>> permute_tokens(x, order=torch.tensor([2, 0, 1]))[0].flatten().tolist()
        [2.0, 0.0, 1.0]
    """
    if order is None and rope is None:
        return tensors
    plain = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    x = tensors[0]
    return dispatch.choose("permute_tokens", x.device, x.dtype, x.shape[3], portable=plain).run(tensors, order, rope)


@dispatch.register("permute_tokens", "portable")
def portable(tensors: tuple[Tensor, ...], order: Tensor | None, rope: Rope | None) -> tuple[Tensor, ...]:
    """`permute_tokens` in plain PyTorch."""
    rotated = tensors if rope is None else (*(_rotate(x, *rope) for x in tensors[:2]), *tensors[2:])
    return rotated if order is None else tuple(x.index_select(1, order) for x in rotated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], -1).flatten(3)
    exact = torch.float64 if cos.dtype is torch.float64 else torch.float32  # as the model rotates
    return (x.to(exact) * cos.unsqueeze(-2) + turned.to(exact) * sin.unsqueeze(-2)).to(x.dtype)


dispatch.register_kernels("permute_tokens", "block")
