"""Laws of launches and ops: each launch gets its own tensors, and what has no gradient says so."""

import pytest
import torch
from torch import Tensor

from foveate.kernels import launch as launches
from foveate.kernels.launch import Launch, gpu_op, launcher


class Kernel:
    """A compiled kernel that records its arguments."""

    def __init__(self):
        self.arg_names, self.compilations, self.calls = ["p_a", "p_b", "p_part", "size", "D"], [], []

    def warmup(self, *args, grid, **constants):
        self.compilations.append((args, grid, constants))
        return {grid: lambda *values: self.calls.append(values)}


def test_a_launch_is_described_once_for_tensors_of_one_kind_and_gets_the_addresses_of_each_call(monkeypatch):
    monkeypatch.setattr(launches, "JITFunction", Kernel)
    kernel, described = Kernel(), []

    @launcher
    def launch(pair: tuple[Tensor, Tensor], d: int) -> Launch:
        a, b = pair
        described.append(a.device.type)
        return Launch(kernel, (3, 2), (a, b, b[1, 2:], len(a)), {"D": d, "num_warps": 4})

    same, x, y = (torch.randn(4, 8) for _ in range(3))
    for a, b in ((same, same), (x, y), (y, x)):  # the first call must not tie its two arguments together
        launch((a, b), 5)
        assert kernel.calls[-1] == (a.data_ptr(), b.data_ptr(), b.data_ptr() + 40, 4, 5)
    [((a, b, part, size), grid, constants)] = kernel.compilations
    assert described == ["meta"]
    assert (grid, constants, size) == ((3, 2, 1), {"D": 5, "num_warps": 4}, 4)
    assert a.data_ptr() == b.data_ptr() == same.data_ptr()
    assert torch.equal(part, same[1, 2:])
    others = x.mT.contiguous().mT, x.double(), torch.randn(33)[1:].view(4, 8), torch.randn(5, 8)
    for number, other in enumerate(others, start=2):
        launch((other, y), 5)
        launch((other, y), 5)
        assert len(described) == number
    launch((x, y), 6)
    assert kernel.calls[-1][-1] == 6


def test_a_launch_of_no_programs_does_nothing(monkeypatch):
    monkeypatch.setattr(launches, "JITFunction", Kernel)
    kernel = Kernel()
    launch = launcher(lambda x: Launch(kernel, (len(x),), (x,), {}))
    launch(torch.empty(0))
    assert not kernel.compilations


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
