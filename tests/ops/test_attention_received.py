"""Laws of received attention: equal to the definition in float64 for any slices; no token gives more than 1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.ops.attention_received import attention_received


def received(queries, keys, *args, **options):
    """Attention received by the context, from a prompt in the last rows."""
    prompt, rows = queries.shape[1], keys.shape[1]
    return attention_received(queries, keys, torch.arange(rows - prompt, rows), *args, **options)[: rows - prompt]


def definition(queries, keys, scale, norm):
    """The definition, one head and one prompt token at a time."""
    (heads, prompt, _), (groups, tokens, _) = queries.shape, keys.shape
    context = tokens - prompt
    attention = torch.zeros(prompt, context, dtype=torch.float64)
    for head in range(heads):
        for i in range(prompt):
            visible = keys[head * groups // heads, : context + i + 1].double()
            attention[i] += (scale * visible @ queries[head, i].double()).softmax(0)[:context] / heads
    if norm == "entropy":
        return -(attention * attention.clamp(min=1e-300).log()).sum(0)
    return torch.linalg.vector_norm(attention, ord={"l2": 2, "l1": 1}[norm], dim=0)


@given(
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    prompt=st.integers(1, 6),
    context=st.integers(1, 9),
    norm=st.sampled_from(["l2", "l1", "entropy"]),
    most=st.sampled_from([1, 60, 10**9]),
    seed=st.integers(0, 99),
)
def test_scores_equal_the_definition_for_any_slices(groups, shared, prompt, context, norm, most, seed):
    torch.manual_seed(seed)
    queries = torch.randn(groups * shared, prompt, 8, dtype=torch.float64)
    keys = torch.randn(groups, context + prompt, 8, dtype=torch.float64)
    expected = definition(queries, keys, 0.7, norm)
    torch.testing.assert_close(received(queries, keys, 0.7, norm, most=most), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_scores_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 33, 8).to(dtype), torch.randn(2, 97, 8).to(dtype)
    scores = received(queries, keys, 0.35)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), definition(queries, keys, 0.35, "l2"), rtol=0.02, atol=1e-3)


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_is_bounded_by_a_slice():
    queries, keys = torch.randn(8, 64, 4), torch.randn(2, 1064, 4)
    with Largest() as largest:
        received(queries, keys, 1.0, most=3 * 8 * 1064)
    assert largest.elements == 3 * 8 * 1064


def test_a_prompt_token_gives_at_most_one():
    torch.manual_seed(0)
    scores = received(torch.randn(4, 1, 8), torch.randn(2, 12, 8), 1.0, "l1")
    assert 0 < float(scores.sum()) < 1


def test_tokens_that_do_not_count_and_rows_that_are_not_in_use_change_nothing():
    torch.manual_seed(0)
    queries, keys, at = torch.randn(4, 3, 8), torch.randn(2, 12, 8), torch.tensor([9, 10, 11])
    more = torch.cat([queries, torch.randn(4, 2, 8)], 1), torch.cat([keys, torch.randn(2, 5, 8)], 1)
    padded = attention_received(*more, torch.tensor([9, 10, 11, 12, 12]), 1.0, counted=torch.arange(5) < 3)
    torch.testing.assert_close(padded[:12], attention_received(queries, keys, at, 1.0))
    assert not padded[12:].any()
