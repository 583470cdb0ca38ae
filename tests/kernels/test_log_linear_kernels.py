"""Laws of the log-linear kernels in Triton's interpreter: equal to masked float64 attention over all nodes."""

from functools import partial

import pytest
import torch
from log_linear_oracle import check, check_readers, pooled, relative, select_nodes
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.kernels.log_linear import backward, forward, select_blocks
from foveate.kernels.log_linear.joint_log_linear_attention import joint_log_linear_attention
from foveate.kernels.log_linear.log_linear_attention import _attend, log_linear_attention
from foveate.kernels.log_linear.pooling import level_sizes, pool
from foveate.ops import joint_attention
from foveate.ops.log_linear_attention import Options, portable

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # from the interpreter, for log(0) and the like
]
slow = partial(pytest.param, marks=pytest.mark.slow)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
OPTIONS = Options(3, 16, 2, 2, True, 0.2, False)


def use_tiles(monkeypatch, step, small):
    """Fewer and larger tiles, which are faster to interpret."""
    queries = {256: forward.KernelConfig(256, step, small, 4, 1, None)}
    monkeypatch.setattr(forward, "FORWARD", queries)
    monkeypatch.setattr(backward, "BACKWARD_QUERIES", queries)
    for name in ("BACKWARD_TOKENS", "BACKWARD_NODES"):
        monkeypatch.setattr(backward, name, {256: forward.KernelConfig(16, 256, 16, 2, 1, None)})
    monkeypatch.setattr(backward, "BACKWARD_SHARED", {256: forward.KernelConfig(128, 256, 16, 2, 1, None)})


@pytest.fixture
def large_tiles(monkeypatch):
    use_tiles(monkeypatch, 128, 64)


def heads_of(tokens, dim, dtype=torch.float32, batch=1, heads=1):
    """Tensors in the layout of models, with the heads of a token next to each other."""
    return torch.randn(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def padding(batch, tokens):
    """A mask in which a run of tokens and many others are padding."""
    real = torch.rand(batch, tokens) > 0.3
    real[0, : min(tokens // 2, 300)] = False
    return real


def run(tokens, levels, top_k, *, block=16, dim=32, dtype=torch.float32, batch=1, heads=1, extra=0, masked=False,
        **options):  # fmt: skip
    """Compare output, LSE and all gradients with the oracle."""
    shape = dim, dtype, batch, heads
    qkv = heads_of(tokens, *shape), heads_of(tokens, *shape), heads_of(tokens, *shape).contiguous()
    extras = [heads_of(extra, *shape) for _ in "kv"] if extra else []
    real = padding(batch, tokens) if masked else None
    given = {"top_k": top_k, "block_size": block, "levels": levels, "enriched": levels, "full": not masked} | options
    tolerance = TOLERANCES[dtype]
    check(log_linear_attention, qkv, extras, real, OPTIONS._replace(**given), tolerance, 2 * tolerance)


MASKED, HALF = {"masked": True}, {"dtype": torch.float16}
CHANGES = {"exclude_selected": True}, {"exclude_selected": True} | MASKED, {"reweight": False} | HALF, {"enriched": 0}


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k", "more"),
    [
        (1, 1, 1, {"heads": 4}),  # the LSE and the gradients of one head alone may be near 0
        (17, 1, 3, {"dim": 16, "extra": 3}),
        (255, 2, 8, {"dim": 16, "extra": 3}),
        (257, 3, 3, {"dim": 16, "extra": 5}),
        (100, 2, 2, {"batch": 2, "extra": 40} | MASKED),
        (135, 1, 3, {"block": 32, "dim": 40}),
        *((60, 1, 3, change) for change in CHANGES[1:]),
        *(slow(*size, {"dim": 16} | half) for *size, half in ((256, 2, 1, HALF), (600, 1, 3, {}), (600, 3, 8, HALF))),
        *(slow(*size, {"batch": 2, "extra": 40} | MASKED) for size in ((17, 1, 1), (300, 2, 5))),
        *(
            slow(270, levels, 3, {"block": block, "dim": dim})
            for block, dim, levels in ((32, 40, 2), (64, 32, 1), (64, 96, 2), (16, 80, 4))
        ),
        *(slow(400, 3, 3, {"extra": 3} | change) for change in (*CHANGES, {"reweight": False}, {"enriched": 1})),
    ],
)
@pytest.mark.usefixtures("large_tiles")
def test_output_lse_and_every_gradient_equal_float64(tokens, levels, top_k, more):
    run(tokens, levels, top_k, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "dim"), [(1, 64), slow(3, 128)])
def test_compiled_tile_sizes_equal_float64(levels, dim):
    run(273, levels, 3, dim=dim, extra=65)


@pytest.mark.parametrize(
    ("tokens", "levels", "more"),
    [
        (256, 1, {}),
        slow(4096, 2, {}),
        slow(768, 1, {"reweight": False, "extra": 3} | HALF),
        slow(768, 2, {"enriched": 1}),
    ],
)
def test_full_nodes_lists_and_steps_need_no_masks(monkeypatch, tokens, levels, more):
    even, found = forward._even, []
    monkeypatch.setattr(forward, "_even", lambda *given: found.append(even(*given)) or found[-1])
    use_tiles(monkeypatch, 16, 32)
    run(tokens, levels, 2, **more)
    run(tokens, levels, 2, exclude_selected=True, **more)
    assert found == [True, True, True, True]


def test_a_selection_with_gaps_is_masked_even_if_everything_else_is_full(monkeypatch):
    use_tiles(monkeypatch, 16, 32)
    q, k, v = (torch.randn(1, 2, 768, 32) for _ in range(3))
    options = OPTIONS._replace(top_k=2, levels=1, enriched=1)
    lists = portable(q, k, v, None, None, None, None, options)[2]
    lists[0][:, :, ::3, 1] = -1
    want, got = (run(q, k, v, None, None, None, lists, options) for run in (portable, log_linear_attention))
    assert relative(got[0], want[0].double()) < 2e-6


@pytest.mark.usefixtures("large_tiles")
def test_lists_and_gradients_may_have_any_strides():
    q, k, v = (torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3))
    grad = torch.randn(1, 2, 40, 16)
    lists = portable(q, k, v, None, None, None, None, OPTIONS)[2]
    results = []
    for turn in (torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        out = log_linear_attention(q, k, v, None, None, None, [turn(x) for x in lists], OPTIONS)[0]
        results.append((out, *torch.autograd.grad(out, (q, k, v), turn(grad))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "levels", "more"), [(150, 1, {"block": 32}), slow(400, 2, {"extra": 3, "masked": True})]
)
@pytest.mark.usefixtures("large_tiles")
def test_tiles_read_by_many_queries_are_split(monkeypatch, tokens, levels, more):
    monkeypatch.setattr(backward, "CHUNK", 64)
    run(tokens, levels, 3, **more)


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k", "block"),
    [
        *((1, 1, 1, 16), (17, 1, 3, 16), (257, 3, 3, 16), (400, 2, 20, 16)),
        *(slow(*case) for case in ((4096, 2, 8, 16), (3000, 2, 3, 32), (5000, 2, 5, 64))),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_rounded_once_and_picks_equal_brute_force(tokens, levels, top_k, block, masked):
    q, k = (heads_of(tokens, 32, torch.float16) for _ in range(2))
    real = padding(1, tokens) if masked else torch.ones(1, tokens, dtype=torch.bool)
    given = [x.masked_fill(~real[:, None, :, None], torch.inf) for x in (q, k)]
    mask = real if masked else None
    means, _, _ = pool(given, mask, block, levels)
    lists, counts = select_blocks.select_blocks(*given, mask, top_k, block, levels)
    for x, got in zip((q, k), means, strict=True):
        want, sizes = zip(*(pooled(x.double(), real, block, level) for level in range(1, levels + 1)), strict=True)
        assert all(torch.equal(a.int(), b) for a, b in zip(sizes, counts, strict=True))
        torch.testing.assert_close(torch.cat(want, 2).half(), got, rtol=1e-3, atol=1e-6)
    queries, keys = (x[0, 0].split(level_sizes(tokens, block, levels)) for x in means)
    best = select_nodes(queries, keys, [count[0] for count in counts], top_k, block)
    for got, want in zip(lists, best, strict=True):
        for got_row, want_row in zip(got[0, 0].tolist(), want, strict=True):
            assert got_row == want_row + [-1] * (got.shape[3] - len(want_row))


@pytest.mark.parametrize("x", [torch.zeros(13, 32), torch.randint(-1, 2, (125, 32)).float()])
def test_ties_go_to_the_smaller_node(x):
    counts = torch.ones(1, len(x), dtype=torch.int32)
    (got,) = select_blocks.pick_nodes(x.expand(2, 1, 1, -1, -1).contiguous(), counts, 16 * len(x), 16, 1, 9)
    assert got[0, 0].tolist() == select_nodes([x], [x], [counts[0]], 9, 16)[0]


@pytest.mark.parametrize("levels", [1, 2])
def test_all_blocks_and_no_means_are_dense_attention(levels):
    q, k, v = (heads_of(200, 32, heads=2) for _ in range(3))
    options = OPTIONS._replace(top_k=13, levels=levels, enriched=0, full=True)
    out, lse, *_ = log_linear_attention(q, k, v, None, None, None, None, options)
    scores = 0.2 * q.double() @ k.double().mT
    assert relative(out, scores.softmax(-1) @ v.double()) < 2e-6
    assert relative(lse, scores.logsumexp(-1)) < 2e-6


def test_large_scores_do_not_overflow():
    q, k, v = (30 * heads_of(300, 32, torch.float16) for _ in range(3))
    options = OPTIONS._replace(scale=1.0, full=True)
    assert log_linear_attention(q, k, v, None, None, None, None, options)[0].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1])  # in queries, in keys
def test_nan_and_infinity_propagate_as_on_the_portable_path(where, value):
    inputs = [torch.randn(1, 1, 64, 32) for _ in range(3)]
    inputs[where][0, 0, 5, 3] = value
    inputs = [x.requires_grad_() for x in inputs]
    options = OPTIONS._replace(top_k=4, levels=1, enriched=1, full=True)
    found = []
    for run in (portable, log_linear_attention):
        out, lse, *_ = run(*inputs, None, None, None, None, options)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        found.append([x.isfinite().flatten(3).all(-1) for x in (out, lse[..., None], *grads)])
    assert not found[0][0].all()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
def test_every_custom_op_passes_opcheck():
    q, k, v, *extras = (torch.randn(1, 1, n, 32).requires_grad_() for n in (20, 20, 20, 4, 4))
    torch.library.opcheck(select_blocks._select_blocks, (q.detach(), k.detach(), None, 3, 16, 2))
    options = 16, 2, 3, 2, True, False, True, 0.2
    torch.library.opcheck(_attend, (q, k, v, *extras, None, [], *options))
    lists = select_blocks.select_blocks(q, k, None, 3, 16, 2)[0]
    torch.library.opcheck(_attend, (q, k, v, None, None, None, lists, *options))


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


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
def test_a_backward_pass_writes_no_gradient_twice():
    q, k, v = (torch.randn(1, 2, 100, 32).requires_grad_() for _ in range(3))
    out = log_linear_attention(q, k, v, None, None, None, None, OPTIONS)[0]
    with Allocations(q.numel()) as allocations:
        torch.autograd.grad(out, (q, k, v), q.detach())
    assert [op for op in allocations.ops if op != "aten::detach"] == ["foveate::log_linear_attention_backward"]


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "supported"),
    [("cuda", torch.bfloat16, 128, 1), ("cuda", torch.float32, 64, 0), ("cuda", torch.half, 256, 0),
     ("cpu", torch.half, 64, 0)],
)  # fmt: skip
def test_the_kernels_support_half_precision_on_nvidia_gpus(monkeypatch, device, dtype, dim, supported):
    monkeypatch.setattr(select_blocks, "compute_capability", lambda index: 80)
    assert select_blocks.supports(torch.device(device), dtype, dim) == bool(supported)


@pytest.mark.parametrize(
    ("tokens", "levels", "top_k", "block"),
    [(300, 3, 2, 16), (260, 1, 3, 16), slow(700, 3, 2, 16), slow(900, 2, 5, 16), slow(1100, 2, 3, 32)],
)
def test_readers_equal_the_transposed_selection(monkeypatch, tokens, levels, top_k, block):
    monkeypatch.setattr(backward, "RUN", 3)
    monkeypatch.setattr(backward, "RUNS", 5)
    monkeypatch.setattr(backward, "AT_ONCE", 4)  # several steps per run
    q, k = (torch.randn(2, 2, tokens, 16) for _ in range(2))
    check_readers(q, k, padding(2, tokens), top_k, block, levels)


@pytest.mark.parametrize(("queries", "text", "scattered"), [(7, 7, True), (7, 7, False), (0, 7, True), (0, 0, True)])
def test_text_and_image_write_to_one_output(large_tiles, queries, text, scattered):
    image = 300
    q, k, v = (heads_of(n + image, 32, heads=2).requires_grad_() for n in (queries, text, text))
    place = torch.randperm(queries + image) if scattered else None
    calls = (f(q, k, v, image, place, OPTIONS) for f in (joint_attention.portable, joint_log_linear_attention))
    want, got = calls
    assert got.stride() == q.stride()
    assert relative(got, want) < 2e-6
    weight = torch.randn_like(want)
    expected, grads = (torch.autograd.grad(x, (q, k, v), weight) for x in (want, got))
    assert all(relative(*both) < 4e-6 for both in zip(grads, expected, strict=True))
