"""Laws of attention over [text | image] by a pattern."""

import log_linear_oracle
import pytest
import torch
from oracle import dense_attention
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import select_blocks
from foveate.ops.block_attention import block_attention
from foveate.ops.block_table import block_starts, block_table
from foveate.ops.joint_attention import LogLinear, backend_of, joint_attention

OPTIONS = {"top_k": 2, "block_size": 16, "levels": None, "enrich": True}


def qkv(tokens, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, 3, tokens, 32, dtype=dtype, requires_grad=True) for _ in range(3)]


def log_linear(text, image, **options):
    return LogLinear(torch.empty(text), torch.empty(image), OPTIONS | options)


@pytest.mark.parametrize("text", [0, 1, 7])
@pytest.mark.parametrize("image", [1, 100, 256, 300])
def test_every_block_picked_and_no_means_is_dense_attention(text, image):
    q, k, v = qkv(text + image)
    got = joint_attention(q, k, v, log_linear(text, image, top_k=99, enrich=False))
    want = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, want)
    grads, others = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want))
    torch.testing.assert_close(grads, others)


@pytest.mark.parametrize("text", [0, 7])
@pytest.mark.parametrize("options", [{}, {"levels": 2}, {"enrich": False}, {"exclude_selected": True}])
def test_text_reads_everything_and_the_image_reads_text_and_what_it_picks(text, options):
    q, k, v = qkv(text + 300)
    got = joint_attention(q, k, v, log_linear(text, 300, **options))
    words, _ = dense_attention(q[:, :, :text], k, v, torch.ones(text, text + 300, dtype=torch.bool))
    image = [x[:, :, text:] for x in (q, k, v)]
    selection = select_blocks(*image[:2], top_k=2, levels=options.get("levels"))
    enrich = None if options.get("enrich", True) else 0
    want, _ = log_linear_oracle.log_linear(
        *image, selection, enrich, extra_k=k[:, :, :text], extra_v=v[:, :, :text],
        exclude_selected="exclude_selected" in options,
    )  # fmt: skip
    torch.testing.assert_close(got, torch.cat([words, want], 2))


def test_a_block_table_is_block_attention():
    q, k, v = qkv(200)
    table = block_table([[i] for i in range(4)], block_starts(200))
    assert torch.equal(joint_attention(q, k, v, table), block_attention(q, k, v, table))
    assert (
        backend_of(table, q.device, q.dtype, 32) == backend_of(log_linear(0, 1), q.device, q.dtype, 32) == "portable"
    )


@pytest.mark.parametrize("image", [256, 4096])
@pytest.mark.parametrize("options", [{}, {"levels": 2}, {"levels": 2, "enrich": 1}, {"enrich": False}, {"top_k": 99}])
def test_pairs_count_the_visible_keys_of_the_definition(image, options):
    pattern = log_linear(5, image, **options)
    q = torch.randn(1, 1, image, 32)
    chosen = OPTIONS | options
    selection = select_blocks(q, q, top_k=chosen["top_k"], levels=chosen["levels"])
    enriched = selection.levels if chosen["enrich"] is True else int(chosen["enrich"])
    keys = sum(int(log_linear_oracle.visible(selection, level)[0, 0, 0].sum()) for level in range(enriched + 1))
    assert pattern.keys() == keys
    assert pattern.pairs() == 5 * (5 + image) + image * (5 + keys)
    assert pattern.sparsity() == pytest.approx(1 - pattern.pairs() / (5 + image) ** 2)


@pytest.mark.parametrize("pattern", [log_linear(7, 100), block_table([[0, 1], [1]], block_starts(107))])
def test_autocast_casts_as_in_pytorch(pattern):
    q, k, v = (x.detach().float() for x in qkv(107))  # under autocast, norms return float32 and projections do not
    low = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        got = joint_attention(q, k, low[2], pattern)
    assert torch.equal(got, joint_attention(*low, pattern))
