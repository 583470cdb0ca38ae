"""Training runs as tests see them: their logged losses, and commands in one and in several processes."""

import csv
import os
import subprocess
import sys

from typer.testing import CliRunner

from foveate.apps.cli import app

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {} -m foveate"


def losses(out):
    return [(int(step), float(loss)) for step, loss, _ in csv.reader((out / "log.csv").read_text().splitlines())]


def alone(command):
    """Run a command of foveate in this process."""
    result = CliRunner().invoke(app, [*command.split(), "--device", "cpu"])
    assert result.exit_code == 0, result.output


def start(processes, command, launcher=TORCHRUN):
    """Start a command of foveate in this many processes on the CPU, as accelerate or torchrun launches it."""
    return subprocess.Popen(
        [sys.executable, *launcher.format(processes).split(), *command.split(), "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def together(processes, command, launcher=TORCHRUN):
    """Run a command of foveate in this many processes."""
    with start(processes, command, launcher) as launched:
        output, _ = launched.communicate()
    assert launched.returncode == 0, output
    assert f"on {processes} devices" in output
