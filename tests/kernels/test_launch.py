"""Laws of launches and ops: each launch gets its own tensors, and an op without a gradient raises an error."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foveate.kernels import launch as launches
from foveate.kernels.launch import Launch, gpu_op, launcher, recorded


class Kernel:
    """A compiled kernel that records its arguments."""

    def __init__(self):
        self.arg_names, self.compilations, self.calls = ["p_a", "p_b", "p_part", "size", "D"], [], []
        self.function, self.packed_metadata = "function", "metadata"

    def warmup(self, *args, grid, **constants):
        self.compilations.append((args, grid, constants))
        return self

    def run(self, *values):
        assert values[3:9] == (7, "function", "metadata", None, None, None)
        self.calls.append((values[:3], values[9:]))


@pytest.fixture
def compiled(monkeypatch):
    """Launches as on a GPU whose current stream is number 7."""
    stream = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=stream))


@pytest.mark.usefixtures("compiled")
def test_a_launch_is_described_once_per_signature_and_gets_the_addresses_of_each_call():
    kernel, described = Kernel(), []

    @launcher
    def launch(pair: tuple[Tensor, Tensor], d: int) -> Launch:
        a, b = pair
        described.append(a.device.type)
        return Launch(kernel, (3, 2), (a, b, b[1, 2:], len(a)), {"D": d, "num_warps": 4})

    same, x, y = (torch.randn(4, 8) for _ in range(3))
    for a, b in ((same, same), (x, y), (y, x)):  # the first call must not record its two arguments as one
        launch((a, b), 5)
        assert kernel.calls[-1] == ((3, 2, 1), (a.data_ptr(), b.data_ptr(), b.data_ptr() + 40, 4, 5))
    [((a, b, part, size), grid, constants)] = kernel.compilations
    assert described == ["meta"]
    assert (grid, constants, size) == ((3, 2), {"D": 5, "num_warps": 4}, 4)
    assert a.data_ptr() == b.data_ptr() == same.data_ptr()
    assert torch.equal(part, same[1, 2:])
    others = x.mT.contiguous().mT, x.double(), torch.randn(33)[1:].view(4, 8), torch.randn(5, 8)
    for number, other in enumerate(others, start=2):
        launch((other, y), 5)
        launch((other, y), 5)
        assert len(described) == number
    launch((x, y), 6)
    assert kernel.calls[-1][1][-1] == 6


@pytest.mark.usefixtures("compiled")
def test_a_launch_of_no_programs_does_nothing():
    kernel = Kernel()
    launch = launcher(lambda x: Launch(kernel, (len(x),), (x,), {}))
    launch(torch.empty(0))
    assert not kernel.compilations


@pytest.mark.usefixtures("compiled")
def test_a_recorded_function_runs_once_and_later_calls_repeat_its_allocations_and_launches():
    kernel, runs = Kernel(), []
    launch = launcher(lambda a, b, part: Launch(kernel, (1,), (a, b, part, 0), {"D": 1}))

    @recorded
    def body(x: Tensor) -> list[Tensor]:
        runs.append(x.device.type)
        result, counts, scratch = torch.empty_like(x), x.new_zeros(5, dtype=torch.int32), x.new_empty(3, 7)
        launch(x, counts, scratch[1])
        launch(result, x, scratch)
        return [result]

    for x in (torch.randn(4, 2).mT, torch.randn(4, 2).mT):
        [result] = body(x)
        (_, first), (_, second) = kernel.calls[-2:]
        assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)
        assert (first[0], second[:2]) == (x.data_ptr(), (result.data_ptr(), x.data_ptr()))
        assert first[2] == second[2] + 28
        assert not {first[1], second[2]} & {x.data_ptr(), result.data_ptr()}
    (_, counts, part, _), *_ = (args for args, *_ in kernel.compilations)
    assert (counts.tolist(), part.shape, part.dtype) == ([0] * 5, (7,), torch.float32)
    assert runs == ["meta"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("body", "error"),
    [(lambda x: [x + 1], "cannot be recorded"), (lambda x: [x.mT.contiguous()], "cannot be recorded"),
     (lambda x: [x], "tensors that it allocates"), (lambda x: [torch.empty_like(x)[:1]], "not arguments or views")],
)  # fmt: skip
def test_recording_other_operations_or_returning_arguments_or_views_raises_an_error(body, error):
    with pytest.raises(ValueError, match=error):
        recorded(body)(torch.ones(2, 3))


@gpu_op("test_without_gradient")
def without_gradient(x: Tensor, scale: float = 2.0) -> list[Tensor]:
    return [x * scale]


def test_an_op_without_gradients_raises_an_error_in_a_backward_pass():
    x = torch.ones(3, requires_grad=True)
    [y] = without_gradient(x)
    assert torch.equal(y, 2 * x)
    with pytest.raises(RuntimeError, match=r"test_without_gradient.* has no gradient"):
        y.sum().backward()
    assert not without_gradient(x.detach())[0].requires_grad
