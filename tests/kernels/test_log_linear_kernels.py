"""Laws of the log-linear kernels in Triton's interpreter: equal to masked float64 attention over all nodes."""

from itertools import pairwise

import pytest
import torch
from log_linear_oracle import log_linear, pooled, select_nodes
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.kernels.log_linear import hierarchical_pooling, log_linear_keys, select_blocks, selection
from foveate.kernels.log_linear import log_linear_attention as glue
from foveate.kernels.log_linear import log_linear_queries as kernels
from foveate.ops.log_linear_attention import Options, portable
from foveate.ops.selection import Selection

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # from the interpreter, for log(0) and the like
]
slow = pytest.mark.slow
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture
def large_tiles(monkeypatch):
    """Fewer and larger steps, which are faster to interpret; there are still partial ones."""
    monkeypatch.setattr(kernels, "FORWARD", {256: kernels.KernelConfig(256, 128, 64, 4, 1, None)})
    monkeypatch.setattr(kernels, "BACKWARD_QUERIES", kernels.FORWARD)
    monkeypatch.setattr(log_linear_keys, "BACKWARD_KEYS", {256: kernels.KernelConfig(16, 256, 16, 2, 1, None)})
    monkeypatch.setattr(log_linear_keys, "BACKWARD_SHARED", {256: kernels.KernelConfig(128, 256, 16, 2, 1, None)})


def heads_of(tokens, dim, dtype, batch=1, heads=1):
    """Tensors in the layout of models, with the heads of a token next to each other."""
    return torch.randn(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def padding(batch, tokens):
    """A mask in which a run of tokens and many others are padding."""
    real = torch.rand(batch, tokens) > 0.3
    real[0, : min(tokens - 1, 300)] = False
    return real


def relative(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-9)).item()


def run(tokens, levels, top_k, *, block=16, dim=32, dtype=torch.float32, batch=1, heads=1, extra=0, masked=False,
        enriched=None, reweight=True, exclude=False, full=True):  # fmt: skip
    """Compare output, LSE and all gradients with the oracle."""
    q, k = (heads_of(tokens, dim, dtype, batch, heads) for _ in range(2))
    v = torch.randn(batch, heads, tokens, dim, dtype=dtype)  # in another layout than k
    dout, extras = (
        heads_of(tokens, dim, dtype, batch, heads),
        [heads_of(extra, dim, dtype, batch, heads) for _ in "kv"],
    )
    dlse = torch.randn(q.shape[:3])
    real = padding(batch, tokens) if masked else torch.ones(batch, tokens, dtype=torch.bool)
    given = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
    means = hierarchical_pooling.pool(given, real if masked else None, block, levels)
    lists = selection.select(*means.values[:2], means.counts, tokens, block, levels, top_k)
    options = {
        "enriched": levels if enriched is None else enriched,
        "reweight": reweight,
        "exclude": exclude,
        "scale": dim**-0.5,
        "full": full,
    }
    keys = kernels.Keys(
        *given[1:], *extras, means, lists, real if masked else None, block=block, top_k=top_k, **options
    )
    out, lse = kernels.forward(given[0], keys)
    dq, binary, delta = kernels.backward_queries(given[0], keys, out, lse, dout, dlse)
    chosen = Selection(tuple(lists), (), tokens, block, top_k)
    readers = [chosen.transpose(level) for level in range(1, levels + 1)]
    grads = dq, *log_linear_keys.backward_keys(given[0], keys, binary, delta, dout, readers)
    inputs = q, k, v, *extras
    for x in inputs:
        x.requires_grad_()
    want, want_lse = log_linear(
        q, k, v, chosen, options["enriched"], reweight, options["scale"], *(x.double() for x in extras), real, exclude
    )
    seen = want_lse.isfinite()
    want_grads = torch.autograd.grad((want * dout).sum() + (want_lse * dlse)[seen].sum(), inputs)
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[~seen] == -torch.inf).all()
    assert not out[~seen].any()
    assert out.dtype == dtype
    assert relative(lse[seen], want_lse[seen]) < TOLERANCES[dtype]
    assert relative(out, want) < TOLERANCES[dtype]
    for grad, other in zip(grads, want_grads, strict=True):
        assert grad.dtype == dtype
        assert relative(grad, other) < 2 * TOLERANCES[dtype]
    assert relative(delta[seen], ((want * dout).sum(-1) - dlse)[seen]) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k"),
    [
        *((1, 1, 1), (17, 1, 3), (255, 2, 8), (256, 2, 1), (257, 3, 3)),
        *(pytest.param(*case, marks=slow) for case in ((1000, 1, 3), (1000, 3, 8), (4096, 2, 8))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=slow)])
@pytest.mark.usefixtures("large_tiles")
def test_output_lse_and_every_gradient_equal_float64(tokens, levels, top_k, dtype):
    run(tokens, levels, top_k, dtype=dtype, dim=16, batch=1 if tokens > 256 else 2, extra=tokens % 7)


@pytest.mark.parametrize(("levels", "dim"), [(1, 64), pytest.param(3, 128, marks=slow)])
def test_the_tile_sizes_that_are_compiled_equal_float64(levels, dim):
    run(273, levels, 3, dim=dim, extra=65)


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k"),
    [(17, 1, 1), (100, 2, 2), pytest.param(600, 2, 5, marks=slow), pytest.param(1000, 3, 2, marks=slow)],
)
@pytest.mark.usefixtures("large_tiles")
def test_padding_is_never_read(tokens, levels, top_k):
    run(tokens, levels, top_k, batch=2, masked=True, extra=40)


@pytest.mark.parametrize(
    ("block", "dim", "levels"),
    [(32, 40, 1), *(pytest.param(*case, marks=slow) for case in ((32, 40, 2), (64, 32, 1), (64, 96, 2), (16, 80, 4)))],
)
@pytest.mark.usefixtures("large_tiles")
def test_other_block_sizes_and_head_dims_equal_float64(block, dim, levels):
    run(270, levels, 3, block=block, dim=dim, heads=2)


@pytest.mark.parametrize(
    "options",
    [
        *({"exclude": True, "masked": True}, {"reweight": False, "dtype": torch.float16}, {"enriched": 0}),
        *(pytest.param(options, marks=slow) for options in ({"exclude": True}, {"reweight": False}, {"enriched": 1})),
    ],
)
@pytest.mark.parametrize("levels", [1, pytest.param(3, marks=slow)])
@pytest.mark.usefixtures("large_tiles")
def test_every_option_equals_float64(options, levels):
    run(400 if levels > 1 else 100, levels, 3, extra=3, **options)


@pytest.mark.parametrize(
    ("tokens", "levels", "options"),
    [
        (256, 1, {}),
        pytest.param(4096, 2, {}, marks=slow),
        pytest.param(768, 1, {"reweight": False, "extra": 3, "dtype": torch.float16}, marks=slow),
        pytest.param(768, 2, {"enriched": 1}, marks=slow),
    ],
)
def test_full_nodes_lists_and_steps_need_no_masks(monkeypatch, tokens, levels, options):
    even, found = kernels._even, []
    monkeypatch.setattr(kernels, "_even", lambda *given: found.append(even(*given)) or found[-1])
    for name in ("FORWARD", "BACKWARD_QUERIES"):
        monkeypatch.setattr(kernels, name, {256: kernels.KernelConfig(256, 16, 32, 4, 1, None)})
    monkeypatch.setattr(log_linear_keys, "BACKWARD_KEYS", {256: kernels.KernelConfig(16, 256, 16, 2, 1, None)})
    monkeypatch.setattr(log_linear_keys, "BACKWARD_SHARED", {256: kernels.KernelConfig(128, 256, 16, 2, 1, None)})
    run(tokens, levels, 2, **options)
    assert found == [True, True]
    run(tokens, levels, 2, exclude=True)
    assert found[2:] == [False, False]


def test_a_selection_with_gaps_is_masked_even_if_all_else_is_full(monkeypatch):
    monkeypatch.setattr(kernels, "FORWARD", {256: kernels.KernelConfig(256, 16, 32, 4, 1, None)})
    q, k, v = (torch.randn(1, 2, 768, 32) for _ in range(3))
    options = Options(2, 16, 1, 1, True, 0.2, False, False, True)
    lists = portable(q, k, v, None, None, None, None, options)[2]
    lists[0][:, :, ::3, 1] = -1
    want, got = (run(q, k, v, None, None, None, lists, options) for run in (portable, glue.log_linear_attention))
    assert relative(got[0], want[0].double()) < 2e-6


def test_lists_may_have_any_strides():
    q, k, v = (torch.randn(2, 2, 40, 16).requires_grad_() for _ in range(3))
    options = Options(2, 16, 2, 2, True, 0.2, False, False, True)
    results = []
    lists = portable(q, k, v, None, None, None, None, options)[2]
    for chosen in (lists, [x.transpose(0, 1).contiguous().transpose(0, 1) for x in lists]):
        out = glue.log_linear_attention(q, k, v, None, None, None, chosen, options)[0]
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "levels", "options"),
    [(150, 1, {"block": 32}), pytest.param(700, 2, {"extra": 3, "masked": True}, marks=slow)],
)
@pytest.mark.usefixtures("large_tiles")
def test_tiles_that_many_queries_read_are_split(monkeypatch, tokens, levels, options):
    monkeypatch.setattr(log_linear_keys, "CHUNK", 64)
    monkeypatch.setattr(log_linear_keys, "CUT", 4)
    run(tokens, levels, 3, **options)


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k", "block"),
    [
        *((1, 1, 1, 16), (17, 1, 3, 16), (257, 3, 3, 16), (400, 2, 20, 16)),
        *(pytest.param(*case, marks=slow) for case in ((4096, 2, 8, 16), (3000, 2, 3, 32), (5000, 2, 5, 64))),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_rounded_once_and_picks_are_those_of_brute_force(tokens, levels, top_k, block, masked):
    q, k = (heads_of(tokens, 32, torch.float16) for _ in range(2))
    real = padding(1, tokens) if masked else torch.ones(1, tokens, dtype=torch.bool)
    given = [x.masked_fill(~real[:, None, :, None], torch.inf) for x in (q, k)]
    means = hierarchical_pooling.pool(given, real if masked else None, block, levels)
    ends = hierarchical_pooling.level_starts(tokens, block, levels)
    for x, got in zip((q, k), means.values, strict=True):
        want, counts = zip(*(pooled(x.double(), real, block, level) for level in range(1, levels + 1)), strict=True)
        assert torch.equal(torch.cat(counts, 1).int(), means.counts)
        torch.testing.assert_close(torch.cat(want, 2).half(), got, rtol=1e-3, atol=1e-6)
    lists = selection.select(*means.values, means.counts, tokens, block, levels, top_k)
    queries, keys = ([x[0, 0, a:b] for a, b in pairwise(ends)] for x in means.values)
    best = select_nodes(queries, keys, [count[0] for count in counts], top_k, block)
    for got, want in zip(lists, best, strict=True):
        for got_row, want_row in zip(got[0, 0].tolist(), want, strict=True):
            assert got_row == want_row + [-1] * (got.shape[3] - len(want_row))


def test_ties_go_to_the_smaller_node():
    x = torch.zeros(1, 1, 200, 32)
    means = hierarchical_pooling.pool((x, x), None, 16, 1)
    lists = selection.select(*means.values, means.counts, 200, 16, 1, 5)
    assert (lists[0] == torch.arange(5)).all()
    x = torch.randint(-1, 2, (1, 1, 125, 32)).float()
    counts = torch.ones(1, 125, dtype=torch.int32)
    (got,) = selection.select(x, x, counts, 2000, 16, 1, 9)
    assert got[0, 0].tolist() == select_nodes([x[0, 0]], [x[0, 0]], [counts[0]], 9, 16)[0]


@pytest.mark.parametrize("levels", [1, 2])
def test_all_blocks_and_no_means_are_dense_attention(levels):
    q, k, v = (heads_of(200, 32, torch.float32, heads=2) for _ in range(3))
    means = hierarchical_pooling.pool((q, k, v), None, 16, levels)
    lists = selection.select(*means.values[:2], means.counts, 200, 16, levels, 13)
    keys = kernels.Keys(k, v, k[:, :, :0], v[:, :, :0], means, lists, None, 16, 13, 0, True, False, 0.3, True)
    out, lse = kernels.forward(q, keys)
    scores = 0.3 * q.double() @ k.double().mT
    assert relative(out, scores.softmax(-1) @ v.double()) < 2e-6
    assert relative(lse, scores.logsumexp(-1)) < 2e-6


def test_large_scores_do_not_overflow():
    q, k, v = (30 * heads_of(300, 32, torch.float16) for _ in range(3))
    means = hierarchical_pooling.pool((q, k, v), None, 16, 2)
    lists = selection.select(*means.values[:2], means.counts, 300, 16, 2, 3)
    keys = kernels.Keys(k, v, k[:, :, :0], v[:, :, :0], means, lists, None, 16, 3, 2, True, False, 1.0, True)
    assert kernels.forward(q, keys)[0].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1])  # in queries, in keys
def test_nan_and_infinity_propagate_as_on_the_portable_path(where, value):
    inputs = [torch.randn(1, 1, 64, 32) for _ in range(3)]
    inputs[where][0, 0, 5, 3] = value
    inputs = [x.requires_grad_() for x in inputs]
    options = Options(4, 16, 1, 1, True, 0.2, False, False, True, True)
    found = []
    for run in (portable, glue.log_linear_attention):
        out, lse, *_ = run(*inputs, None, None, None, None, options)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        found.append([x.isfinite().flatten(3).all(-1) for x in (out, lse[..., None], *grads)])
    assert not found[0][0].all()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_padding_gets_zeros_and_no_lse_whatever_it_holds():
    q, k, v = (torch.randn(1, 1, 40, 32) for _ in range(3))
    real = torch.arange(40)[None] > 2
    for value in (torch.inf, -torch.inf, torch.nan, 3e38):
        q[0, 0, 0, 5] = value
        out, lse, *_ = glue.log_linear_attention(
            q, k, v, None, None, real, None, Options(2, 16, 1, 1, True, 0.2, False, False, True, False)
        )
        assert (lse[0, 0, :3] == -torch.inf).all()
        assert not out[0, 0, :3].any()
        assert lse[0, 0, 3:].isfinite().all()


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 2, 60), pytest.param(2, 3, 600, marks=slow)])
@pytest.mark.parametrize(("extra", "masked", "again"), [(0, False, False), (5, True, False), (3, False, True)])
@pytest.mark.usefixtures("large_tiles")
def test_outputs_and_gradients_equal_the_portable_path(batch, heads, tokens, extra, masked, again):
    q, k, v = (torch.randn(batch, heads, tokens, 32).requires_grad_() for _ in range(3))
    extras = [torch.randn(batch, heads, extra, 32).requires_grad_() for _ in "kv"] if extra else [None, None]
    real = padding(batch, tokens) if masked else None
    options = Options(3, 16, 2, 2, True, 0.2, True, False, True)
    lists = portable(k, k, v, *extras, real, None, options)[2] if again else None
    want, got = (run(q, k, v, *extras, real, lists, options) for run in (portable, glue.log_linear_attention))
    seen = want[1].isfinite()
    assert relative(got[0], want[0].double()) < 2e-6
    assert relative(got[1][seen], want[1][seen].double()) < 2e-6
    for ours, theirs in zip((*got[2], *got[3]), (*want[2], *want[3]), strict=True):
        assert torch.equal(ours, theirs)
    grad, grad_lse = torch.randn(batch, heads, 32, tokens).mT, torch.randn(batch, heads, tokens) * seen
    inputs = [x for x in (q, k, v, *extras) if x is not None]
    ours, theirs = (
        torch.autograd.grad([out, lse.where(seen, 0)], inputs, [grad, grad_lse]) for out, lse, *_ in (got, want)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b.double()) < 4e-6
    lists, counts = select_blocks.select_blocks(q.detach(), k.detach(), real, 3, 16, 2)
    if not again:
        assert all(torch.equal(a, b) for a, b in zip((*lists, *counts), (*got[2], *got[3]), strict=True))


@pytest.mark.usefixtures("large_tiles")
def test_every_custom_op_passes_opcheck():
    q, k, v = (torch.randn(1, 1, 20, 32) for _ in range(3))
    means, counts, logs = select_blocks.pool_levels([q, k, v], None, 16, 2)
    torch.library.opcheck(select_blocks.pool_levels, ([q, k, v], None, 16, 2))
    torch.library.opcheck(select_blocks.pick_nodes, (means, counts, 20, 16, 2, 3))
    lists = select_blocks.pick_nodes(means, counts, 20, 16, 2, 3)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 32))]
    torch.library.opcheck(glue._attend, (*leaves, means, counts, logs, lists, None, 16, 3, 2, True, False, 0.2, True))


class Allocations(TorchDispatchMode):
    """Records the ops that return new tensors of at least `size` elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.ops = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor)]
        if not func.is_view and any(x.numel() >= self.size for x in tensors):
            self.ops.append(func.name())
        return made


@pytest.mark.usefixtures("large_tiles")
def test_a_backward_pass_writes_no_gradient_twice():
    q, k, v = (torch.randn(1, 2, 100, 32).requires_grad_() for _ in range(3))
    options = Options(3, 16, 2, 2, True, 0.2, False, False, True)
    out = glue.log_linear_attention(q, k, v, None, None, None, None, options)[0]
    with Allocations(q.numel()) as allocations:
        torch.autograd.grad(out, (q, k, v), q.detach())
    assert [op for op in allocations.ops if op != "aten::detach"] == ["foveate::log_linear_attention_backward"]


def test_the_kernels_support_half_precision_on_nvidia_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda = torch.device("cuda")
    assert select_blocks.supports(cuda, torch.bfloat16, 128)
    assert not select_blocks.supports(cuda, torch.float32, 64)
    assert not select_blocks.supports(cuda, torch.float16, 256)
    assert not select_blocks.supports(torch.device("cpu"), torch.float16, 64)


def test_readers_equal_the_transposed_selection(monkeypatch):
    monkeypatch.setattr(selection, "RUN", 3)
    monkeypatch.setattr(selection, "RUNS", 5)
    monkeypatch.setattr(selection, "AT_ONCE", 4)  # several steps per run
    sizes = [(41, 1), (11, 4), (2, 2)]
    lists = [torch.randint(-2, nodes, (2, 3, nodes, picks), dtype=torch.int32).clamp(min=-1) for nodes, picks in sizes]
    for level, (offsets, rows) in enumerate(selection.readers_of(lists)):
        want = Selection(tuple(lists), (), 41 * 16, 16, 4).transpose(level + 1)
        assert offsets.dtype == rows.dtype == torch.int32
        assert torch.equal(offsets, want.offsets)
        assert torch.equal(rows.where(want.rows >= 0, -1), want.rows)
