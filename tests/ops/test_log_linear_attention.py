"""Laws of log-linear attention: equal to float64 attention over the visible keys of the definition."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from log_linear_oracle import log_linear, visible
from oracle import dense_attention

from foveate.ops import dispatch, log_linear_attention, select_blocks

slow = partial(pytest.param, marks=pytest.mark.slow)
SIZES = [(1, 1), (15, 1), (16, 1), (17, 2), (255, 2), (257, 3), (1000, 3), (1000, 1)]


def qkv(seed, tokens, batch=1, heads=2, dim=32, dtype=torch.float64, extra=None):
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens,) * 3 if extra is None else (tokens,) * 3 + (extra,) * 2
    return [torch.randn(batch, heads, n, dim, generator=generator, dtype=dtype).requires_grad_() for n in sizes]


def padding(seed, batch, tokens, share=0.7):
    return torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < share


def constant_blocks(seed, tokens, run):
    """Random queries, and keys and values that are constant within each run."""
    q, k, v = qkv(seed, tokens)
    return [q, *(x[:, :, ::run].repeat_interleave(run, 2)[:, :, :tokens].detach().requires_grad_() for x in (k, v))]


def gradients(out, lse, inputs, lse_too=True):
    """Gradients of a fixed random loss; rows without keys have no LSE to differentiate."""
    generator = torch.Generator().manual_seed(0)
    loss = (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    if lse_too:
        weight = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        loss = loss + (lse.double().masked_fill(lse == -torch.inf, 0) * weight).sum()
    return torch.autograd.grad(loss, inputs)


def compare(got, want, inputs, lse_too=True):
    """Assert that output, LSE and all gradients of two results are close."""
    results = ((*each[:2], *gradients(*each[:2], inputs, lse_too)) for each in (got, want))
    torch.testing.assert_close(*results)


def dense(q, k, v):
    return dense_attention(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))


# --- against the definition ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k", "dim"),
    [
        *((*size, top_k, 32) for size in SIZES for top_k in (1, 5)),
        *((tokens, 2, 2, dim) for tokens, dim in ((300, 48), (300, 80), (257, 33), (100, 160), (100, 256))),
        (4097, 4, 3, 32),
    ],
)
def test_output_and_every_gradient_equal_the_definition(tokens, levels, top_k, dim):
    inputs = qkv(tokens, tokens, dim=dim, heads=1 if levels == 4 else 2)
    got = log_linear_attention(*inputs, top_k=top_k, levels=levels)
    compare(got, log_linear(*inputs, got.selection), inputs, lse_too=dim == 32)


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 600),
    top_k=st.integers(1, 13),
    block=st.sampled_from([16, 32, 64]),
    level=st.integers(1, 3),
    extra=st.sampled_from([None, 0, 1, 20]),
    share=st.sampled_from([None, 0.8, 0.03]),
    enrich=st.integers(0, 3),
    reweight=st.booleans(),
    exclude=st.booleans(),
    scale=st.sampled_from([None, 0.05, 0.7]),
)
def test_any_combination_of_options_equals_the_definition(
    seed, tokens, top_k, block, level, extra, share, enrich, reweight, exclude, scale
):
    inputs = qkv(seed, tokens, batch=2, extra=extra)
    levels = min(level, next(n for n in (1, 2, 3) if tokens <= block**n))
    enrich = min(enrich, levels)
    real = None if share is None else padding(seed, 2, tokens, share)
    options = {"reweight": reweight, "exclude_selected": exclude, "scale": scale}
    options |= {} if extra is None else dict(zip(("extra_k", "extra_v"), inputs[3:], strict=True))
    got = log_linear_attention(
        *inputs[:3], top_k=top_k, block_size=block, levels=levels, enrich=enrich, key_padding_mask=real, **options
    )
    compare(got, log_linear(*inputs[:3], got.selection, enrich=enrich, real=real, **options), inputs)


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [(torch.float32, 1e-5, 5e-5), (torch.float16, 2e-3, 4e-3), (torch.bfloat16, 8e-3, 1.5e-2)],
)
def test_every_dtype_stays_near_float64_and_keeps_its_dtype(dtype, forward, backward):
    inputs = qkv(2, 1000, dim=64, dtype=dtype, extra=20)
    options = {"extra_k": inputs[3], "extra_v": inputs[4]}
    got = log_linear_attention(*inputs[:3], top_k=3, levels=2, **options)
    want = log_linear(*inputs[:3], got.selection, **options)
    assert (got.out.dtype, got.lse.dtype) == (dtype, torch.float32)
    for one, other in zip(got[:2], want, strict=True):
        assert (one - other).norm() < forward * other.norm()
    for one, other in zip(gradients(*got[:2], inputs), gradients(*want, inputs), strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() < backward * other.norm()


def test_gradients_pass_gradcheck():
    inputs = qkv(3, 40, heads=1, extra=2)
    selection = select_blocks(*inputs[:2], top_k=1, levels=2)

    def attend(q, k, v, extra_k, extra_v):
        return log_linear_attention(q, k, v, top_k=1, selection=selection, extra_k=extra_k, extra_v=extra_v)[:2]

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


# --- the laws of the method ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "levels"), [*SIZES, (257, 1), (257, 2), (1000, 2), slow(4097, 4)])
def test_every_block_picked_and_no_means_is_dense_attention(tokens, levels):
    inputs = qkv(tokens, tokens)
    got = log_linear_attention(*inputs, top_k=tokens, levels=levels, enrich=False)
    compare(got, dense(*inputs), inputs)


@pytest.mark.parametrize(("tokens", "levels"), SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 1000])
def test_constant_nodes_weigh_each_token_by_how_often_it_is_visible(tokens, levels, top_k):
    q, k, v = constant_blocks(tokens, tokens, 16**levels)
    got = log_linear_attention(q, k, v, top_k=top_k, levels=levels)
    times = sum(
        visible(got.selection, level)[..., torch.arange(tokens) // 16**level].long() for level in range(levels + 1)
    )
    assert top_k < 1000 or (times == levels + 1).all()
    scores = q @ k.mT * 32**-0.5 + times.log()
    torch.testing.assert_close(got[:2], (scores.softmax(-1) @ v, scores.logsumexp(-1)))


@pytest.mark.parametrize(("tokens", "levels"), SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 100])
def test_constant_nodes_excluding_selected_ones_are_dense_attention(tokens, levels, top_k):
    inputs = constant_blocks(tokens, tokens, 16**levels)
    got = log_linear_attention(*inputs, top_k=top_k, levels=levels, exclude_selected=True)
    torch.testing.assert_close(got[:2], dense(*inputs))


def test_output_is_linear_in_the_values_and_ones_give_ones():
    q, k, v = qkv(6, 1000)
    want, got = (log_linear_attention(q, k, x, levels=3).out for x in (v, 2 * v + 3))
    torch.testing.assert_close(got, 2 * want + 3)


def test_a_vector_added_to_all_keys_shifts_only_the_lse():
    q, k, v = qkv(7, 1000)
    shift = torch.randn(32, dtype=torch.float64)
    want, got = (log_linear_attention(q, x, v, levels=2, top_k=2, scale=0.3) for x in (k, k + shift))
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse + 0.3 * q @ shift)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_children_of_a_node_may_be_permuted(level):
    inputs = qkv(9, 1024)
    children = torch.arange(1024).view(-1, 16**level)
    order = torch.cat([family[torch.randperm(len(family))] for family in children.split(16)]).flatten()
    want = log_linear_attention(*inputs, top_k=2, levels=2)
    got = log_linear_attention(*(x[:, :, order] for x in inputs), top_k=2, levels=2)
    torch.testing.assert_close(got[:2], (want.out[:, :, order], want.lse[:, :, order]))


@pytest.mark.parametrize(("tokens", "padded", "levels"), [(1, 5, 1), (100, 111, 2), (100, 300, 1), (257, 800, 3)])
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_trailing_padding_equals_the_shorter_sequence(tokens, padded, levels, poison):
    inputs = qkv(tokens, tokens)
    want = log_linear_attention(*inputs, top_k=3, levels=levels)
    room = 0, 0, 0, padded - tokens
    longer = [torch.nn.functional.pad(x.detach(), room, value=poison).requires_grad_() for x in inputs]
    real = torch.arange(padded)[None] < tokens
    got = log_linear_attention(*longer, top_k=3, levels=levels, key_padding_mask=real)
    assert (got.out[:, :, tokens:] == 0).all()
    assert (got.lse[:, :, tokens:] == -torch.inf).all()
    short = got.out[:, :, :tokens], got.lse[:, :, :tokens]
    torch.testing.assert_close(short, want[:2])
    for grad, expected in zip(gradients(*short, longer), gradients(*want[:2], inputs), strict=True):
        torch.testing.assert_close(grad, torch.nn.functional.pad(expected, room))


def test_a_sample_of_only_padding_gives_zeros_and_no_lse():
    inputs = qkv(11, 100, batch=2, extra=3)
    real = torch.tensor([[True], [False]]).expand(2, 100)
    options = {"extra_k": inputs[3], "extra_v": inputs[4], "key_padding_mask": real}
    out, lse, _ = log_linear_attention(*inputs[:3], levels=2, **options)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    for grad in gradients(out, lse, inputs):
        assert (grad[1] == 0).all()
        assert grad[0].isfinite().all()


@pytest.mark.parametrize("extra", [1, 77, 512])
def test_extra_tokens_equal_an_lse_merge_with_dense_attention_over_them(extra):
    inputs = qkv(12, 300, extra=extra)
    q, k, v, extra_k, extra_v = inputs
    got = log_linear_attention(q, k, v, top_k=2, levels=2, extra_k=extra_k, extra_v=extra_v)
    a, lse_a, _ = log_linear_attention(q, k, v, top_k=2, levels=2)
    b, lse_b = dense(q, extra_k, extra_v)
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    compare(got, (weight * a + (1 - weight) * b, torch.logaddexp(lse_a, lse_b)), inputs)


# --- execution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [None, 0, 1, 2])
def test_neither_a_second_run_nor_the_layout_of_an_input_changes_a_bit(which):
    inputs = qkv(15, 500, batch=2, dtype=torch.float32, extra=7)
    results = []
    for other in (None, which):
        given = [x.detach() for x in inputs]
        if other is not None:
            given[other] = given[other].transpose(1, 2).contiguous().transpose(1, 2)
        given = [x.requires_grad_() for x in given]
        got = log_linear_attention(*given[:3], extra_k=given[3], extra_v=given[4], levels=2)
        results.append([*got[:2], *gradients(*got[:2], given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_selection_can_be_reused_and_sets_the_levels():
    q, k, v = qkv(17, 700)
    first = log_linear_attention(q, k, v, top_k=3, levels=3)
    again = log_linear_attention(q, k, v, top_k=3, selection=first.selection)
    assert torch.equal(again.out, first.out)
    assert again.selection is first.selection
    other = qkv(18, 700)
    got = log_linear_attention(*other, top_k=3, selection=first.selection)
    compare(got, log_linear(*other, first.selection), other)


@pytest.mark.parametrize("enrich", [True, False])
def test_a_selection_works_with_other_padding(enrich):
    inputs = qkv(19, 300, batch=2)
    selection = select_blocks(*inputs[:2], top_k=2, levels=2, key_padding_mask=padding(1, 2, 300))
    assert not selection.full  # lists may have gaps, which kernels must mask
    assert select_blocks(*inputs[:2], top_k=2, levels=2).full
    for real in (padding(2, 2, 300, 0.03), None):
        got = log_linear_attention(*inputs, top_k=2, selection=selection, enrich=enrich, key_padding_mask=real)
        compare(got, log_linear(*inputs, selection, enrich=2 * enrich, real=real), inputs)
        if real is not None and not enrich:  # some real tokens have no real keys
            assert (got.lse == -torch.inf)[real[:, None].expand_as(got.lse)].any()


def test_a_block_picked_by_every_block_equals_the_definition():
    q, k, v = qkv(20, 1000)
    selection = select_blocks(q, k, top_k=1, levels=2)
    selection = selection._replace(lists=tuple(torch.zeros_like(lists) for lists in selection.lists))
    got = log_linear_attention(q, k, v, top_k=1, selection=selection)
    compare(got, log_linear(q, k, v, selection), (q, k, v))


@pytest.mark.parametrize("at_once", [1, 10**5])
def test_pieces_of_any_size_give_the_same_result(at_once, monkeypatch):
    inputs = qkv(21, 1500, batch=2)
    want = log_linear_attention(*inputs, levels=2)
    monkeypatch.setattr("foveate.ops.picked_attention.AT_ONCE", at_once)
    got = log_linear_attention(*inputs, levels=2)
    compare(got, want, inputs)


def test_autocast_changes_no_bit():
    inputs = qkv(22, 500, dtype=torch.float32)
    want = log_linear_attention(*inputs, levels=2)
    wanted = gradients(*want[:2], inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = log_linear_attention(*inputs, levels=2)
        grads = gradients(*got[:2], inputs)
    assert torch.equal(got.out, want.out)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_the_ops_pass_opcheck():
    q, k, v, extra_k, extra_v = qkv(23, 100, dtype=torch.float32, extra=5)
    selection = select_blocks(q, k, top_k=2, levels=2)
    real, lists = padding(0, 1, 100), list(selection.lists)
    torch.library.opcheck(
        torch.ops.foveate.picked_attention.default,
        (q, k, v, extra_k, extra_v, torch.zeros(1, 5), real, lists, 16, 0, False, 0.2),
    )
    pooled = [torch.randn(1, 2, nodes, 32) for nodes in (7, 1)]
    torch.library.opcheck(
        torch.ops.foveate.select_blocks_portable.default, (pooled, pooled, list(selection.counts), 2, 16)
    )


COMPILED = """
import torch
from foveate.ops import log_linear_attention
torch.manual_seed(0)
q, k, v, text = (torch.randn(2, 2, n, 32, requires_grad=True) for n in (700, 700, 700, 9))
real = torch.rand(2, 700) < 0.9
def attend(q, k, v, text, scale):
    more = {"extra_k": text, "extra_v": text, "key_padding_mask": real, "exclude_selected": True}
    return log_linear_attention(q, k, v, levels=2, top_k=3, scale=scale, **more)
compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
for scale in (0.2, 0.3):  # a float that changes becomes a symbol
    results = []
    for run in (attend, compiled):
        out, lse, selection = run(q, k, v, text, scale)
        results.append([out, lse, *selection.lists, *torch.autograd.grad(out.square().sum(), (q, k, v, text))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
"""


@pytest.mark.slow
def test_one_graph_under_compile_gives_the_same_bits():
    result = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("tokens", "keys", "backward"),
    [
        *((5000, 276, True), (16384, 320, True)),
        *(slow(*case) for case in ((4096, 384, True), (2**17 + 1, 417, False))),
    ],
)
def test_flops_follow_from_the_keys_per_query(tokens, keys, backward):
    inputs = [x.requires_grad_(backward) for x in qkv(24, tokens, heads=1, dtype=torch.float32)]
    with torch.profiler.profile(with_flops=True) as profile:
        out = log_linear_attention(*inputs).out
        if backward:
            out.sum().backward()
    flops = sum(event.flops for event in profile.key_averages())
    expected = (4 + 10 * backward) * tokens * keys * 32  # two products forward, five backward
    assert expected <= flops < 1.1 * expected


MEMORY = """
import resource, torch
from foveate.ops import log_linear_attention
torch.set_num_threads(1)
for tokens in (1000, 16384, 65536):
    q, k, v = (torch.randn(1, 1, tokens, 64, requires_grad=True) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log_linear_attention(q, k, v).out.sum().backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / q.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.slow
def test_memory_of_a_training_step_is_linear():
    printed = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    _, short, long = map(float, printed.split())
    assert short < 24  # times the memory of q, including three gradients
    assert long < 14


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(1, 2, 100, 64)}, r"\[1, 2, 100, 32\], \[1, 2, 100, 64\]"),
        ({"v": torch.zeros(1, 2, 100, 32).double()}, "float32 on cpu, torch.float64 on cpu"),
        ({"levels": 3}, "use levels<=2"),
        ({"scale": 0.0}, "above 0, not 0.0"),
        ({"scale": float("nan")}, "finite and above 0, not nan"),
        ({"enrich": 2}, "a number of levels up to 1, not 2"),
        ({"enrich": -1}, "not -1"),
        ({"extra_k": torch.zeros(1, 2, 5, 32)}, "extra_v is None"),
        ({"extra_v": torch.zeros(1, 2, 5, 32)}, "extra_k is None"),
        (
            {"extra_k": torch.zeros(1, 2, 5, 32), "extra_v": torch.zeros(1, 2, 6, 32)},
            r"\[1, 2, extra, 32\] like q: got \[1, 2, 5, 32\] and \[1, 2, 6, 32\]",
        ),
        ({"extra_k": torch.zeros(1, 5, 32), "extra_v": torch.zeros(1, 5, 32)}, r"got \[1, 5, 32\]"),
        (
            {"extra_k": torch.zeros(1, 2, 5, 32).half(), "extra_v": torch.zeros(1, 2, 5, 32).half()},
            "torch.float32 on cpu like q: got torch.float16",
        ),
        ({"key_padding_mask": torch.ones(2, 100, dtype=torch.bool)}, r"\[1, 100\].* \[2, 100\]"),
    ],
)
def test_mismatched_inputs_are_refused(change, message):
    inputs = dict.fromkeys("qkv", torch.zeros(1, 2, 100, 32))
    with pytest.raises(ValueError, match=message):
        log_linear_attention(**(inputs | change))


@pytest.mark.parametrize(
    ("made", "used", "message"),
    [
        ((1, 2, 101, 32), {}, "tokens=101 not 100"),
        ((2, 3, 100, 32), {}, "batch=2 not 1, heads=3 not 2"),
        ((1, 2, 100, 32), {"top_k": 4}, "top_k=8 not 4"),
        ((1, 2, 100, 32), {"block_size": 32}, "block_size=16 not 32"),
        ((1, 2, 100, 32), {"levels": 2}, "levels=1 not 2"),
    ],
)
def test_a_selection_for_another_call_is_refused(made, used, message):
    other, inputs = torch.zeros(made), torch.zeros(1, 2, 100, 32)
    with pytest.raises(ValueError, match=f"made for {message}.* again"):
        log_linear_attention(inputs, inputs, inputs, selection=select_blocks(other, other), **used)


def test_more_picks_than_kernels_can_read_run_on_the_portable_path(monkeypatch):
    calls = []
    known = dispatch.backends("log_linear_attention", torch.device("cpu"), torch.float64, 32)
    kernel = dispatch.Backend("kernel", lambda *work: True, lambda *given: calls.append(1) or known[0].run(*given))
    monkeypatch.setitem(dispatch._BACKENDS, "log_linear_attention", [*known, kernel])
    q, k, v = qkv(0, 300)
    log_linear_attention(q, k, v)
    assert calls == [1]
    log_linear_attention(q, k, v, top_k=129)
    assert calls == [1]
