"""Rotary position embedding, and copies of rows with rotation to other positions."""

from jaxtyping import Float
from torch import Tensor

from foveate.ops import dispatch

__all__ = ["copy_rows", "rotate"]

SLICE = 2048  # rows to rotate at once, in a wider dtype


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


def copy_rows(
    out: Float[Tensor, "layers heads rows dim"],
    x: Float[Tensor, "layers heads rows dim"],
    cos: Float[Tensor, "rows dim"] | None = None,
    sin: Float[Tensor, "rows dim"] | None = None,
) -> None:
    """Copy `x` into `out`, rotated by the angles of `cos` and `sin`, if given, in their dtype.

    Raises:
        ValueError: If the shapes differ.
    """
    if out.shape != x.shape or (cos is not None and cos.shape != x.shape[2:]):
        raise ValueError(f"rows of shape {list(x.shape)} do not fit into {list(out.shape)}: pass equal shapes")
    dispatch.choose("copy_rows", x.device, x.dtype, x.shape[3]).run(out, x, cos, sin)


@dispatch.register("copy_rows", "portable")
def portable(out: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """`copy_rows` in plain PyTorch."""
    for start in range(0, x.shape[2], SLICE):
        some = slice(start, start + SLICE)
        rows = x[:, :, some]
        out[:, :, some] = rows if cos is None or sin is None else rotate(rows, cos[some], sin[some])


dispatch.register_kernels("copy_rows", "rows")
