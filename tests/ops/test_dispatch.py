"""The law of the dispatcher: of the backends that take the work, the last one registered runs it."""

import torch

from foveate.ops import dispatch


def test_the_last_that_takes_the_work_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    dispatch.register("add", "anywhere", takes=lambda *work: True)(lambda: "slow")
    dispatch.register("add", "small", takes=lambda device, dtype, size: size < 64)(lambda: "fast")
    chosen = [dispatch.choose("add", torch.device("cpu"), torch.float32, size) for size in (63, 64)]
    assert [backend.name for backend in chosen] == ["small", "anywhere"]
    assert [backend.run() for backend in chosen] == ["fast", "slow"]
