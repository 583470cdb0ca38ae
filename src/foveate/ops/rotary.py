"""Rotary position embedding."""

from jaxtyping import Float
from torch import Tensor

__all__ = ["rotate"]


def rotate(
    x: Float[Tensor, "*heads tokens dim"], cos: Float[Tensor, "tokens dim"], sin: Float[Tensor, "tokens dim"]
) -> Float[Tensor, "*heads tokens dim"]:
    """`x` rotated by the angles of `cos` and `sin`; channel i is paired with channel i + dim / 2.

    Source: "RoFormer", arXiv 2104.09864, with the channel pairs of `transformers`.

    Examples:
        >>> import torch
        >>> quarter = torch.tensor([[torch.pi / 2] * 2])
        >>> rotate(torch.tensor([[1.0, 0.0]]), quarter.cos(), quarter.sin()).round(decimals=3) + 0
        tensor([[0., 1.]])
    """
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos
    rotated[..., : first.shape[-1]].addcmul_(second, sin[..., : first.shape[-1]], value=-1)
    rotated[..., first.shape[-1] :].addcmul_(first, sin[..., first.shape[-1] :])
    return rotated
