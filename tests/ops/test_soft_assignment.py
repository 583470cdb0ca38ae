"""Laws of soft assignment: facility location by cosine, a softmax over the picks, and its row-normalised form."""

import pytest
import torch

from foveate.ops.facility_location import facility_location
from foveate.ops.soft_assignment import soft_assignment


def test_tokens_are_compared_by_their_cosine_and_picks_ascend():
    tokens = torch.randn(2, 3, 30, 5)
    z = tokens / tokens.norm(dim=-1, keepdim=True)
    picks, _, spread = soft_assignment(tokens, 7, 20.0)
    assert torch.equal(picks, facility_location(z @ z.mT, 7).sort(-1).values)
    scores = 20.0 * z.take_along_dim(picks[..., None], 2) @ z.mT
    torch.testing.assert_close(spread, scores.softmax(-2))
    scaled = tokens.double() * torch.rand(30, 1).add(0.5)
    torch.testing.assert_close(soft_assignment(scaled, 7, 20.0), soft_assignment(tokens.double(), 7, 20.0))


def test_unmerge_weights_of_a_token_sum_to_one_and_merged_tokens_are_means():
    tokens = torch.randn(2, 16, 5)
    given = torch.tensor([[1, 5], [0, 15]])
    picks, gather, spread = soft_assignment(tokens, 2, 3.0, given)
    assert torch.equal(picks, given)
    torch.testing.assert_close(spread.sum(-2), torch.ones(2, 16))
    torch.testing.assert_close(gather, spread / spread.sum(-1, keepdim=True))


@pytest.mark.usefixtures("as_a_user")
def test_impossible_budgets_are_refused():
    with pytest.raises(ValueError, match="1 to 30 of 30 tokens, not 31"):
        soft_assignment(torch.randn(30, 5), 31, 1.0)
