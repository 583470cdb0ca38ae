"""Laws of the kernels that round the inputs of attention to FP8: equal to their definition."""

import pytest
import torch

from foveate.kernels.block import round_inputs as kernels
from foveate.ops.fp8 import round_inputs


def assert_equal(got, want):
    """Equal, but for Triton's interpreter, which halves what it rounds up to a power of two and errs near zero."""
    got, want = got.float(), want.float()
    assert ((got == want) | (want.frexp().mantissa.abs() == 0.5) & (2 * got == want)).float().mean() > 0.99


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real kernels")
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (70, 333), (300, 64)])
@pytest.mark.parametrize("outlier", [1, 1000])
def test_inputs_are_rounded_as_defined(queries, keys, outlier):
    q, k, v = (torch.randn(2, n, 2, 16).transpose(1, 2) for n in (queries, keys, keys))
    k[0, 1, keys // 5] *= outlier
    v[1, 0, keys // 3] *= outlier
    got, want = kernels.round_inputs(q, k, v), round_inputs(q, k, v)
    values = got.v.float().unflatten(3, (-1, 4, 2, 2)).transpose(4, 5).flatten(3).mT  # their keys in order
    for x, y in ((got.q, want.q), (got.k, want.k), (values[:, :, :keys], want.v)):
        assert_equal(x, y)
    assert values.shape[2] % kernels.ALIGNED == 0
    assert not values[:, :, keys:].any()
    torch.testing.assert_close(got.q_scale, want.q_scale)
    torch.testing.assert_close(got.scales.movedim(2, 0), want.scales)
    torch.testing.assert_close(got.means.movedim(2, 0), want.means)
