"""Laws of `foveate serve` and `foveate rag serve` before anything is loaded."""

import os
import sys

import pytest
from typer.testing import CliRunner

from foveate.__main__ import main
from foveate.apps import cli
from foveate.apps.cli import app
from foveate.apps.cli.serve import scale_of


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve --host 0.0.0.0", "set FOVEATE_API_KEY"),
        ("serve --replicas 2 --max-replicas 1", "is less than --replicas 2"),
        ("serve --steps 200", "raise --max-steps"),
        ("serve --method nothing", "nothing"),
        ("rag serve --host 0.0.0.0", "set FOVEATE_API_KEY"),
        ("rag serve --replicas 2 --max-replicas 1", "is less than --replicas 2"),
        ("rag serve nowhere --port 0", "is not a folder"),
        ("rag serve --prompt x", "must contain {question}"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(command, words, monkeypatch):
    monkeypatch.delenv("FOVEATE_API_KEY", raising=False)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "loading" not in result.output


def test_more_replicas_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert scale_of(2, 0, kinds=1, gpus=True) == (2, 2)
    assert scale_of(4, 8, kinds=1, gpus=False) == (4, 8)
    with pytest.raises(ValueError, match="4 replicas need a GPU each, and this machine has 2: start fewer"):
        scale_of(2, 0, kinds=2, gpus=True)


@pytest.mark.parametrize(
    ("command", "policy", "restarts"),
    [
        ("serve --port 0", "", True),
        ("rag serve notes", "", True),
        ("serve", "ACTIVE", False),
        ("rag notes", "", False),
        ("generate serve", "", False),
    ],
)
def test_idle_threads_of_services_do_not_spin(command, policy, restarts, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(sys, "argv", ["foveate", *command.split()])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "foveate", *command.split()])
    monkeypatch.setattr(cli, "main", lambda: None)
    found = []
    monkeypatch.setattr(os, "execve", lambda *arguments: found.append(arguments))
    main()
    again = (sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    assert found == ([again] if restarts else [])
