"""Laws of the machine: times tell steps apart, and add up."""

import time

import pytest
import torch

from foveate.utils.device import versions
from foveate.utils.timing import Stopwatch


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


@pytest.mark.parametrize("git", ["missing", "exit 128"])
def test_versions_can_be_told_where_git_cannot(git, tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "src" / "foveate").mkdir(parents=True)
    if git != "missing":
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr("foveate.__file__", str(tmp_path / "src" / "foveate" / "__init__.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions()["commit"] == "unknown"
