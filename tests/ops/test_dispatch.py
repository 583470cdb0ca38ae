"""The law of the dispatcher: the last registered backend that supports a call runs it."""

import torch

from foveate.ops import dispatch


def test_the_last_backend_that_supports_a_call_runs_it(monkeypatch):
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    dispatch.register("add", "anywhere")(lambda: "slow")
    dispatch.register("add", "small", supports=lambda device, dtype, size: size < 64)(lambda: "fast")
    chosen = [dispatch.choose("add", torch.device("cpu"), torch.float32, size) for size in (63, 64)]
    assert [backend.name for backend in chosen] == ["small", "anywhere"]
    assert [backend.run() for backend in chosen] == ["fast", "slow"]
