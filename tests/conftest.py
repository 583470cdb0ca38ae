"""Shapes and types of all functions are checked while tests run; no network; kernels are interpreted."""

import os
import warnings
from contextlib import contextmanager
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads that spin slow down a busy machine

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import covering
import jaxtyping
import pytest
import shape_check
from hypothesis import settings

shape_check.install()
settings.register_profile("fast", deadline=None, max_examples=10)
settings.register_profile("exhaustive", deadline=None, max_examples=25)
torch.set_num_threads(1)
collect_ignore = ["kernels/compile_sm90.py"]  # a script
if find_spec("triton") is None:  # there is none for macOS
    collect_ignore += ["kernels", "gpu/test_kernels.py"]


def fast(config):
    return "not slow" in config.option.markexpr


def pytest_configure(config):
    settings.load_profile("fast" if fast(config) else "exhaustive")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow what the fast tests leave out: most cases of a law, and more examples of a property."""
    properties = [item for item in items if hasattr(getattr(item, "function", None), "hypothesis")]
    for item in (*covering.left_to_slow(items), *(() if fast(config) else properties)):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _poison(request):
    """In the tests of ops and kernels, floats that nobody writes are NaN and integers out of range."""
    torch.use_deterministic_algorithms(request.path.parent.name in ("ops", "kernels"))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_a_user():
    """Without the checks of the tests, which would refuse a wrong argument before foveate can."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def fixed_destinations(monkeypatch):
    """Destinations of ToMA that are spread evenly, whatever the features: rounding cannot change them."""
    from foveate.ops.soft_assignment import soft_assignment

    def assign(tokens, kept, scale, picks):
        picks = torch.arange(kept, device=tokens.device) * tokens.shape[2] // kept
        return soft_assignment(tokens, kept, scale, picks.expand(*tokens.shape[:2], kept))

    monkeypatch.setattr("foveate.methods.toma.soft_assignment", assign)


@pytest.fixture
def no_synchronization():
    """A context in which it is an error to wait for the GPU."""

    @contextmanager
    def context():
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context
