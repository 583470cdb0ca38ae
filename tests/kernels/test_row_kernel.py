"""Laws of the kernels of rows in Triton's interpreter: equal to masked float64 attention, and to copies."""

import pytest
import torch
from far import far_apart
from oracle import dense_attention

from foveate.kernels.block.block_attention import KernelConfig
from foveate.kernels.rows import row_attention as kernel
from foveate.kernels.rows.copy_rows import copy_rows
from foveate.kernels.rows.row_attention import row_attention
from foveate.ops.rotary import rotate
from foveate.ops.row_attention import portable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu checks the compiled kernel")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "FORWARD", (KernelConfig(64, 64, 4, 2),))
    monkeypatch.setattr(kernel, "FEW", (KernelConfig(32, 32, 4, 2),))


def error(rows, tokens, heads, groups, dim, dtype, scale=0.2):
    q = torch.randn(2, rows.shape[-1], heads, dim, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(2, groups, tokens, dim, dtype=dtype) for _ in range(2))
    got, lse = row_attention(q, k, v, rows, scale, None, None, True)
    mask = rows[..., None] >= torch.arange(tokens)
    mask = mask if rows.ndim == 1 else mask[:, None]
    share = heads // groups
    want, sums = dense_attention(q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), mask, scale)
    torch.testing.assert_close(lse.double(), sums.double(), rtol=1e-3, atol=1e-3 if dtype == torch.float16 else 1e-5)
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "chosen", "dim"),
    [
        *((1, 1, 16), (150, 7, 64), (70, 40, 40)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((257, 7, 64), (130, 65, 128), (200, 200, 96))),
    ],
)
def test_rows_equal_the_dense_mask(monkeypatch, tokens, chosen, dim, parts, dtype, tolerance):
    monkeypatch.setattr(kernel, "_parts", lambda *work: parts)
    rows = torch.randperm(tokens)[:chosen].sort().values
    assert error(rows, tokens, 4, 2, dim, dtype) < tolerance


def test_first_and_last_rows_and_a_negative_scale():
    for rows in ([0], [0, 299], [63, 64], list(range(250, 300))):
        assert error(torch.tensor(rows), 300, 2, 1, 16, torch.float32) < 1e-5
    assert error(torch.tensor([5, 80, 290]), 300, 2, 2, 16, torch.float32, scale=-0.3) < 1e-5


@pytest.mark.parametrize("parts", [1, 3])
def test_samples_may_differ_in_rows_windows_and_sinks(monkeypatch, parts):
    monkeypatch.setattr(kernel, "_parts", lambda *work: parts)
    rows = torch.stack([torch.randperm(100)[:20].sort().values for _ in range(2)])
    rows[1, 17:] = 99  # padding of a shorter prompt
    assert error(rows, 100, 2, 1, 16, torch.float32) < 1e-5
    q, (k, v), sinks = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 1, 100, 16), torch.randn(2)
    for window, logits in ((1, sinks), (20, None), (90, None), (None, sinks)):
        got, want = (attend(q, k, v, rows, 0.3, window, logits)[0] for attend in (row_attention, portable))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_keys_after_the_last_row_are_never_read():
    q, (k, v) = torch.randn(1, 2, 70, 16), torch.randn(2, 1, 1, 200, 16)
    rows = torch.arange(30, 100)
    want, _ = row_attention(q, k, v, rows, 0.25)
    k[:, :, 100:], v[:, :, 100:] = torch.nan, torch.nan
    assert torch.equal(row_attention(q, k, v, rows, 0.25)[0], want)


@pytest.mark.parametrize("dimension", ["batch", "heads", "tokens"])
def test_strides_may_exceed_32_bits(dimension):
    q, k, v, _ = far_apart(dimension)
    rows = torch.arange(65)
    want, _ = dense_attention(q, k, v, rows[:, None] >= rows)
    torch.testing.assert_close(row_attention(q, k, v, rows, 0.25)[0].double(), want, rtol=3e-3, atol=3e-3)


def test_it_passes_opcheck_and_does_not_support_cpus():
    k = torch.randn(1, 2, 30, 16)
    torch.library.opcheck(row_attention, (torch.randn(1, 4, 5, 16), k, k, torch.arange(4, 9), 0.25))
    assert row_attention(torch.randn(1, 4, 0, 16), k, k, torch.arange(0), 0.25)[0].shape == (1, 4, 0, 16)
    assert not kernel.supports(torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.parametrize(("rows", "dim"), [(1, 2), (33, 16), (70, 40)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_copied_rows_are_rotated_in_float32_and_the_others_stay(rows, dim, dtype):
    torch.manual_seed(0)
    source = torch.randn(3, rows + 5, 2, dim, dtype=dtype).transpose(1, 2)[:, :, 5:]
    whole = torch.full((3, 4, 2, rows + 9, dim), 7.0, dtype=dtype)
    cos, sin = torch.rand(rows, dim), torch.rand(rows, dim)
    copy_rows(whole[:, 1, :, 4 : 4 + rows], source, cos, sin)
    copy_rows(whole[:, 2, :, :rows], source, None, None)
    want = rotate(source.double(), cos.double(), sin.double())
    error = (whole[:, 1, :, 4 : 4 + rows] - want).abs().max()
    assert error < {torch.float16: 2e-3, torch.float32: 1e-6}[dtype] * want.abs().max()
    assert torch.equal(whole[:, 2, :, :rows], source)
    whole[:, 1, :, 4 : 4 + rows] = whole[:, 2, :, :rows] = 7.0
    assert (whole == 7).all()
