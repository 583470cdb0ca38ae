"""Laws of the attention modules: dense attention if everything is read, the op with projections otherwise."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from foveate.nn import LogLinearAttention


def double(*args, **options):
    torch.manual_seed(0)
    return LogLinearAttention(*args, **options).double()


def rope_of(tokens, dim):
    angles = torch.arange(tokens)[:, None] * 10000 ** -torch.linspace(0, 1, dim // 2)
    angles = angles.repeat_interleave(2, 1).double()
    return angles.cos(), angles.sin()


def dense(module, x, rope=None, context=None):
    """Dense attention with the same projections, and with RoPE as products of complex numbers."""
    everyone = x if context is None else torch.cat([x, context], 1)
    q, k, v = (
        part(everyone).unflatten(2, (module.heads, -1)).transpose(1, 2) for part in (module.q, module.k, module.v)
    )
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        turn = torch.polar(torch.ones_like(rope[0][:, ::2]), torch.atan2(rope[1], rope[0])[:, ::2])
        turn = torch.cat([turn, torch.ones(q.shape[2] - len(turn), turn.shape[1], dtype=turn.dtype)])
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(3, (-1, 2)).contiguous()) * turn).flatten(3)
            for y in (q, k)
        )
    return module.out(scaled_dot_product_attention(q[:, :, : x.shape[1]], k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tokens", [1, 17, 300])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("extra", [None, 7])
def test_every_block_picked_and_no_means_is_dense_attention(tokens, qk_norm, extra):
    module = double(128, 2, top_k=tokens, enrich=False, qk_norm=qk_norm)
    x = torch.randn(2, tokens, 128, dtype=torch.float64, requires_grad=True)
    context = None if extra is None else torch.randn(2, extra, 128, dtype=torch.float64)
    for rope in (None, rope_of(tokens, 64)):
        got, want = module(x, rope=rope, context=context), dense(module, x, rope, context)
        torch.testing.assert_close(got, want)
        inputs = x, *module.parameters()
        grads = (torch.autograd.grad(each.square().sum(), inputs) for each in (got, want))
        torch.testing.assert_close(*grads)


def test_constant_blocks_excluding_selected_ones_are_dense_attention():
    module = double(64, 2, top_k=2, exclude_selected=True)
    x = torch.randn(1, 64, 64, dtype=torch.float64).repeat_interleave(16, 1)
    torch.testing.assert_close(module(x), dense(module, x))


def test_a_selection_can_be_shared_between_layers():
    first, second = double(64, 2), double(64, 2)
    x = torch.randn(1, 5000, 64, dtype=torch.float64)
    out, selection = first(x, return_selection=True)
    torch.testing.assert_close(second(x, selection=selection), out)
    _, again = second(torch.randn_like(x), selection=selection, return_selection=True)
    assert again is selection


def test_padding_reaches_no_real_token():
    module = double(64, 2, top_k=1)
    x = torch.randn(2, 100, 64, dtype=torch.float64)
    real = torch.arange(100)[None] < torch.tensor([[70], [100]])
    out = module(x.masked_fill(~real[..., None], 1e6), key_padding_mask=real)
    torch.testing.assert_close(out[:1, :70], module(x[:1, :70]))
    torch.testing.assert_close(out[1:], module(x[1:]))


def test_it_trains_under_autocast():
    module = LogLinearAttention(64, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(torch.randn(1, 200, 64), context=torch.randn(1, 3, 64))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("dim", "heads", "options", "message"),
    [
        (100, 3, {}, "100 channels cannot be split into 3 heads"),
        (64, 4, {}, "32 to 256, not 16"),
        (64, 2, {"top_k": 0}, "1 or more, not 0"),
        (64, 2, {"block_size": 8}, "16, 32, 64, not 8"),
        (64, 2, {"levels": 7}, "not 7"),
        (64, 2, {"levels": 1, "enrich": 2}, "a number of levels up to 1, not 2"),
    ],
)
def test_bad_options_and_sizes_are_refused(dim, heads, options, message):
    with pytest.raises(ValueError, match=message):
        LogLinearAttention(dim, heads, **options)


def test_every_option_reaches_attention():
    torch.manual_seed(0)
    x, module = torch.randn(1, 700, 64), LogLinearAttention(64, 2, top_k=2, levels=2)
    changed = {"top_k": 3, "block_size": 32, "levels": 1, "enrich": 1, "reweight": False, "exclude_selected": True}
    for name, value in changed.items():
        other = LogLinearAttention(64, 2, **{"top_k": 2, "levels": 2} | {name: value})
        other.load_state_dict(module.state_dict())
        assert not torch.equal(other(x), module(x)), name


@pytest.mark.usefixtures("as_a_user")
def test_rope_for_other_tokens_is_refused():
    with pytest.raises(ValueError, match=r"must be \[50, 32\], not \[40, 32\]"):
        LogLinearAttention(64, 2)(torch.randn(1, 50, 64), rope=(torch.ones(40, 32), torch.ones(40, 32)))
    with pytest.raises(ValueError, match="pairs of channels, but heads have 33"):
        LogLinearAttention(66, 2)(torch.randn(1, 50, 66), rope=(torch.ones(50, 33), torch.ones(50, 33)))
