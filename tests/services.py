"""Services on Ray, started as a user would."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil


@contextmanager
def started(command, folder):
    """The address, process and log of a `foveate` command that serves. It must end well, with all of its replicas."""
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "foveate", *command.split(), "--device", "cpu", "--port", "0"],
            stdout=file, stderr=file, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        while not (address := re.search(r"^http://\S+$", log.read_text(), re.MULTILINE)):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield address[0], process, log
    finally:
        process.terminate()
    assert process.wait(60) == 0, log.read_text()
    _, left = psutil.wait_procs(replicas(), timeout=60)
    assert not left


def replicas():
    """Processes of the replicas; Ray writes their deployment into the command line."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in found if "ServeReplica:foveate:replica-" in " ".join(process.info["cmdline"])]
