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
def test_rotated_and_permuted_tokens_equal_the_definition(shape, permuted, rope, dtype):
    batch, tokens, heads, dim = shape
    q, v = (torch.randn(shape, dtype=dtype) for _ in range(2))
    k = torch.randn(batch, heads, tokens, dim, dtype=dtype).transpose(1, 2)  # other strides
    order = torch.randperm(tokens)[: tokens - 2] if permuted else None
    angles = torch.rand(batch if rope == "per sample" else 1, tokens, dim // 2).repeat_interleave(2, -1)
    angles = angles if rope == "per sample" else angles[0]
    rotation = (angles.cos(), angles.sin()) if rope else None
    want = portable(tuple(x.double() for x in (q, k, v)), order, rotation)
    for got, exact in zip(kernel((q, k, v), order, rotation), want, strict=True):
        torch.testing.assert_close(got, exact.to(dtype))
    (alone,) = kernel((v,), order, None)
    assert torch.equal(alone, v if order is None else v[:, order])


@pytest.mark.slow
def test_the_op_passes_opcheck():
    tensors, rope = [torch.randn(2, 9, 3, 8) for _ in range(3)], torch.randn(2, 9, 8)
    torch.library.opcheck(torch.ops.foveate.permute_tokens.default, (tensors, torch.randperm(9)[:7], *rope))
    torch.library.opcheck(torch.ops.foveate.permute_tokens.default, (tensors, None, *rope))
