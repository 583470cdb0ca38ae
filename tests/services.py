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
        running = replicas(process)
        process.terminate()
    assert process.wait(60) == 0, log.read_text()
    _, left = psutil.wait_procs(running, timeout=60)
    assert not left


def replicas(service):
    """Processes of the replicas of a service; Ray writes their deployment into the command line."""
    found = psutil.Process(service.pid).children(recursive=True) if service.poll() is None else []
    return [process for process in found if "ServeReplica:foveate-" in " ".join(command_of(process))]


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return ()
