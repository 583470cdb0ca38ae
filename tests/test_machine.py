"""Laws of the machine: times tell steps apart, and add up."""

import time

import pytest
import torch

from foveate.machine import Stopwatch


def test_steps_add_up_to_what_passed_meanwhile():
    watch, began = Stopwatch(torch.device("cpu")), time.perf_counter()
    for name in ("one", "two"):
        with watch.step(name):
            time.sleep(0.01)
    passed = time.perf_counter() - began
    assert list(watch.seconds) == ["one", "two"]
    assert min(watch.seconds.values()) >= 0.01
    assert sum(watch.seconds.values()) <= passed


def test_a_step_that_failed_has_no_time():
    watch = Stopwatch(torch.device("cpu"))
    with pytest.raises(ValueError, match="x"), watch.step("bad"):
        raise ValueError("x")
    assert watch.seconds == {}
