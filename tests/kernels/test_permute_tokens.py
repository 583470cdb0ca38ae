"""Laws of the kernel that rotates and permutes tokens: equal to plain PyTorch, in float64 if it rounds."""

import pytest
import torch

from foveate.kernels.block.permute_tokens import permute_tokens as kernel
from foveate.ops.permute_tokens import portable

SHAPES = [(1, 37, 3, 16), (2, 20, 24, 128), (3, 5, 1, 10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rope", [None, "shared", "per sample"])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("halves", "rest"), [(False, 0), (True, 0), (True, 4), (False, 4)])
def test_rotated_and_permuted_tokens_equal_the_definition(shape, permuted, rope, dtype, halves, rest):
    batch, tokens, heads, dim = shape
    q, v = (torch.randn(shape, dtype=dtype) for _ in range(2))
    k = torch.randn(batch, heads, tokens, dim, dtype=dtype).transpose(1, 2)  # other strides
    order = torch.randperm(tokens)[: tokens - 2] if permuted else None
    angles = torch.rand(batch if rope == "per sample" else 1, tokens, (dim - rest) // 2)
    angles = torch.cat([angles, angles], -1) if halves else angles.repeat_interleave(2, -1)
    angles = angles if rope == "per sample" else angles[0]
    rotation = (angles.cos(), angles.sin()) if rope else None
    want = portable(tuple(x.double() for x in (q, k, v)), order, rotation, halves)
    for got, exact in zip(kernel((q, k, v), order, rotation, halves), want, strict=True):
        torch.testing.assert_close(got, exact.to(dtype))
    (alone,) = kernel((v,), order, None)
    assert torch.equal(alone, v if order is None else v[:, order])


@pytest.mark.parametrize(("halves", "width"), [(False, 12), (True, 12), (True, 8)])
def test_rotation_turns_each_pair_of_channels_by_its_angle(halves, width):
    x, angles = torch.randn(1, 5, 2, 12).double(), torch.rand(5, width // 2).double()
    both = torch.cat([angles, angles], -1) if halves else angles.repeat_interleave(2, -1)
    (got,) = portable((x,), None, (both.cos(), both.sin()), halves)
    for i in range(width // 2):
        pair = [i, i + width // 2] if halves else [2 * i, 2 * i + 1]
        turned = torch.view_as_complex(x[..., pair].contiguous()) * torch.exp(1j * angles[:, i, None])
        torch.testing.assert_close(got[..., pair], torch.view_as_real(turned))
    assert torch.equal(got[..., width:], x[..., width:])


@pytest.mark.slow
def test_the_op_passes_opcheck():
    tensors, rope = [torch.randn(2, 9, 3, 8) for _ in range(3)], torch.randn(2, 9, 8)
    torch.library.opcheck(torch.ops.foveate.permute_tokens.default, (tensors, torch.randperm(9)[:7], *rope))
    torch.library.opcheck(torch.ops.foveate.permute_tokens.default, (tensors, None, *rope))
    torch.library.opcheck(torch.ops.foveate.permute_tokens.default, (tensors, None, *(x[..., :6] for x in rope), True))
