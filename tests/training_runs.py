"""Training runs as tests see them: their logged losses, and commands on several devices."""

import csv
import os
import subprocess
import sys


def losses(out):
    return [(int(step), float(loss)) for step, loss, _ in csv.reader((out / "log.csv").read_text().splitlines())]


def on_devices(devices, command):
    """Run a command of foveate in this many processes on the CPU, where accelerate would launch one."""
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {devices} -m foveate {command} --device cpu"
    result = subprocess.run(
        [sys.executable, *launch.split()], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert devices == 1 or f"on {devices} devices" in result.stderr
