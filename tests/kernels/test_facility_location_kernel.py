"""Laws of the facility location kernel, in Triton's interpreter: it picks what the portable path picks."""

import pytest
import torch

from foveate.kernels.cosine_facility_location import cosine_facility_location, takes
from foveate.ops.facility_location import portable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernel")


@pytest.mark.parametrize(
    ("tokens", "dim", "budget"), [(1, 8, 1), (16, 40, 8), (30, 7, 30), (64, 96, 20), (100, 33, 9)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_picks_what_the_portable_path_picks(tokens, dim, budget, dtype):
    sets = torch.randn(3, tokens, dim).to(dtype)
    assert torch.equal(cosine_facility_location(sets, budget), portable(sets, budget))


def test_any_strides_and_the_first_of_equals():
    sets = torch.randn(2, 5, 12).mT  # [2, 12, 5]
    assert torch.equal(cosine_facility_location(sets, 4), portable(sets, 4))
    twins = torch.randn(1, 6, 9).repeat_interleave(2, 1)
    assert (cosine_facility_location(twins, 6) % 2 == 0).all()
    assert cosine_facility_location(torch.zeros(1, 4, 3), 4).tolist() == [[0, 1, 2, 3]]


def test_it_passes_opcheck_and_says_what_it_takes():
    torch.library.opcheck(cosine_facility_location, (torch.randn(2, 10, 4), 3))
    assert takes(torch.device("cuda"), torch.bfloat16, 128)
    assert not takes(torch.device("cuda"), torch.bfloat16, 129)
    assert not takes(torch.device("cpu"), torch.float32, 16)
