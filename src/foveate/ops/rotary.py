"""Rotary positions: turn queries and keys to where they stand."""

from jaxtyping import Float
from torch import Tensor

__all__ = ["rotate"]


def rotate(
    x: Float[Tensor, "*heads tokens dim"], cos: Float[Tensor, "tokens dim"], sin: Float[Tensor, "tokens dim"]
) -> Float[Tensor, "*heads tokens dim"]:
    """`x` turned to the positions that `cos` and `sin` stand for; channel i forms a pair with channel i + dim / 2.

    Source: "RoFormer", arXiv 2104.09864, with the pairs as `transformers` lays them out.

    Examples:
        >>> import torch
        >>> quarter = torch.tensor([[torch.pi / 2] * 2])
        >>> rotate(torch.tensor([[1.0, 0.0]]), quarter.cos(), quarter.sin()).round(decimals=3) + 0
        tensor([[0., 1.]])
    """
    first, second = x.chunk(2, dim=-1)
    turned = x * cos
    turned[..., : first.shape[-1]].addcmul_(second, sin[..., : first.shape[-1]], value=-1)
    turned[..., first.shape[-1] :].addcmul_(first, sin[..., first.shape[-1] :])
    return turned
