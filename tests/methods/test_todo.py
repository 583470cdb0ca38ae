"""Laws of the baseline that downsamples keys and values."""

import pytest
import torch
from oracle import dense_attention
from torch.nn.functional import interpolate

from foveate.methods.base import DenseFallback
from foveate.methods.baselines.todo import ToDo
from foveate.ops.block_attention import block_attention


@pytest.mark.parametrize("grid", [(16, 20), (9, 31), (64, 64)])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("text", [0, 15])
def test_all_tokens_read_the_text_and_the_pixels_of_a_smaller_image(grid, factor, text):
    plan = ToDo(factor=factor).plan((grid,), text)
    cells = grid[0] * grid[1]
    raster = torch.arange(cells, dtype=torch.float64).view(1, 1, *grid)
    small = interpolate(raster, size=tuple(side // factor for side in grid), mode="nearest-exact").flatten().long()
    into = torch.cat([torch.arange(text), text + plan.orders[0].argsort()])
    mask = plan.tables[0].to_dense()[into][:, into]
    want = torch.zeros(text + cells, dtype=torch.bool)
    want[:text] = want[text + small] = True
    assert torch.equal(mask, want.expand_as(mask))
    assert plan.nominal_sparsity == 1 - len(small) / cells


def test_a_factor_of_one_is_dense_and_reference_images_are_read_in_full():
    assert ToDo(factor=1).plan(((8, 8),), 5).tables[0].sparsity() == 0
    plan = ToDo().plan(((8, 8), (3, 3)), 5)
    assert plan.segments == ((1, 9), (0, 16), (0, 48))
    q, k, v = torch.randn(3, 1, 2, 5 + 73, 8, dtype=torch.float64)
    want, _ = dense_attention(q, k[:, :, :30], v[:, :, :30], torch.ones(78, 30, dtype=torch.bool))
    torch.testing.assert_close(block_attention(q, k, v, plan.tables[0]), want)


@pytest.mark.usefixtures("as_a_user")
def test_bad_factors_are_refused():
    with pytest.raises(ValueError, match="not 0"):
        ToDo(factor=0)
    with pytest.raises(DenseFallback, match="too few for a factor of 4"):
        ToDo(factor=4).plan(((3, 9),), 0)
