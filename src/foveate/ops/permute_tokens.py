"""Reordering of queries, keys and values, with the rotary embedding in the same pass."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["permute_tokens"]

Rope = tuple[Float[Tensor, "*batch tokens rotated"], Float[Tensor, "*batch tokens rotated"]]


def permute_tokens(
    *tensors: Float[Tensor, "batch tokens heads dim"],
    order: Int[Tensor, "taken"] | None = None,
    rope: Rope | None = None,
    halves: bool = False,
) -> tuple[Float[Tensor, "batch taken heads dim"], ...]:
    """Tokens ``x[:, order]`` of each tensor, after rotation of the first two, queries and keys.

    On an NVIDIA GPU this is one kernel, unless gradients are needed.

    Args:
        tensors: One to three tensors.
        order: Tokens to take; None takes all tokens in their order.
        rope: (cos, sin) of each token before the permutation, for all channels or the first of them. Channels 2i and
            2i + 1 form a pair, as in FLUX.
        halves: Pair each rotated channel of the first half with the one at its place in the second, as in Llama.

    Examples:
        >>> x = torch.arange(3.0).view(1, 3, 1, 1)
        >>> permute_tokens(x, order=torch.tensor([2, 0, 1]))[0].flatten().tolist()
        [2.0, 0.0, 1.0]
    """
    if order is None and rope is None:
        return tensors
    plain = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    x = tensors[0]
    return dispatch.choose("permute_tokens", x.device, x.dtype, x.shape[3], portable=plain).run(
        tensors, order, rope, halves
    )


@dispatch.register("permute_tokens", "portable")
def portable(
    tensors: tuple[Tensor, ...], order: Tensor | None, rope: Rope | None, halves: bool = False
) -> tuple[Tensor, ...]:
    """`permute_tokens` in plain PyTorch."""
    rotated = tensors if rope is None else (*(_rotate(x, *rope, halves) for x in tensors[:2]), *tensors[2:])
    return rotated if order is None else tuple(x.index_select(1, order) for x in rotated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    x, rest = x.tensor_split([cos.shape[-1]], -1)
    if halves:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-odd, even], -1).flatten(3)
    double = torch.float64 in (cos.dtype, x.dtype if halves else None)  # as the models rotate
    exact = torch.float64 if double else torch.float32
    out = (x.to(exact) * cos.unsqueeze(-2) + turned.to(exact) * sin.unsqueeze(-2)).to(x.dtype)
    return torch.cat([out, rest], -1) if rest.shape[-1] else out


dispatch.register_kernels("permute_tokens", "block")
