"""Laws of row attention: each row equals causal float64 attention under a dense mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.ops import row_attention as module
from foveate.ops.row_attention import row_attention


def definition(q, k, v, rows, scale, window=None, sinks=None):
    """Attention by a dense mask; a sink is one more key, of zeros with this logit."""
    share, (batch, heads, chosen, _) = q.shape[1] // k.shape[1], q.shape
    distance = rows[..., None] - torch.arange(k.shape[2])
    mask = ((distance >= 0) & (distance < (window or 99))).expand(batch, chosen, -1)[:, None]
    scores = scale * q @ k.repeat_interleave(share, 1).mT
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(batch, heads, chosen, 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(share, 1)


@given(
    tokens=st.integers(1, 60),
    part=st.floats(0, 1),
    groups=st.integers(1, 3),
    share=st.integers(1, 4),
    at_once=st.integers(1, 70),
    samples=st.sampled_from([(), (2,)]),
    window=st.none() | st.integers(1, 70),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_equal_the_dense_mask_in_any_slices(tokens, part, groups, share, at_once, samples, window, sinks, seed):
    torch.manual_seed(seed)
    rows = torch.rand(*samples, tokens).argsort()[..., : round(part * tokens)].sort().values
    logits = torch.randn(groups * share, dtype=torch.float64) if sinks else None
    q = torch.randn(2, rows.shape[-1], groups * share, 8, dtype=torch.float64).transpose(1, 2)
    k, v = (torch.randn(2, groups, tokens, 8, dtype=torch.float64) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE", at_once)
        got = row_attention(q, k, v, rows, 0.3, window, logits)
    torch.testing.assert_close(got, definition(q, k, v, rows, 0.3, window, logits), rtol=1e-12, atol=1e-12)


def test_heads_must_be_a_multiple_of_groups():
    k = torch.zeros(1, 3, 5, 8)
    with pytest.raises(ValueError, match="4 heads cannot share 3 groups"):
        row_attention(torch.zeros(1, 4, 2, 8), k, k, torch.arange(2))


@pytest.mark.usefixtures("as_a_user")
def test_bad_rows_and_shapes_are_refused_with_their_values():
    q, k = torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 5, 8)
    for rows in ([1, 0], [-1, 0], [4, 5]):
        with pytest.raises(ValueError, match=rf"rows must ascend within 0 to 4, not \[{rows[0]}, {rows[1]}\]"):
            row_attention(q, k, k, torch.tensor(rows))
    for others in ((q, k, k[:, :, :4], 2), (q, k, k, 3), (q, k.expand(2, 3, 5, 8), k.expand(2, 3, 5, 8), 2)):
        with pytest.raises(ValueError, match="q must be"):
            row_attention(*others[:3], torch.arange(others[3]))
