# pyright: basic
"""Soak test of `foveate rag serve`: clients ask and leave while replicas die, the index changes and its disk is full.

python -m lab.bench.soak_documents lab/results/soak-documents-cpu.json --minutes 20       # a CPU is enough

Each answer must be the one that the question gets alone. The disk of the index is filled if it has less than 256 MB
free: name a small one with --place, such as a tmpfs.
"""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Any

import httpx
import psutil
import typer

from foveate.apps.demo.examples import write_examples
from foveate.utils.device import versions
from foveate.utils.files import write_whole
from lab.quality.common import Commit

URL = "/v1/chat/completions"
EVENT_SECONDS = 15
SMALL_DISK = 256 * 2**20
UNRELATED = "A sentence that no question asks for."


def main(
    out: Annotated[Path, typer.Argument(help="JSON file of the result.")],
    minutes: float = 20.0,
    clients: int = 32,
    replicas: int = 2,
    place: Annotated[Path | None, typer.Option(help="Folder of the index; a temporary one by default.")] = None,
    seed: int = 0,
    commit: Commit = "",
) -> None:
    """Run the test, and write the result."""
    with TemporaryDirectory() as folder:
        questions, _ = write_examples(Path(folder), seed)
        index = place or Path(folder) / "index"
        foveate = [sys.executable, "-m", "foveate", "rag"]
        subprocess.run([*foveate, "index", "facts", "--index", str(index), "--device", "cpu"], cwd=folder, check=True)
        command = [*foveate, "serve", str(index), "--device", "cpu", "--port", "0", "--replicas", str(replicas)]
        with served(command, Path(folder) / "log") as (address, service):
            soak = Soak(address, service, index, Path(folder), random.Random(seed).sample([*questions], 60))
            found = soak.run(minutes, clients, seed)
    settings = {"minutes": minutes, "clients": clients, "replicas": replicas, "seed": seed}
    result = {"settings": settings, "soak": found, "versions": versions() | ({"commit": commit} if commit else {})}
    write_whole(out, json.dumps(result, indent=2).encode() + b"\n")
    print(json.dumps(result, indent=2))
    if found["lost"] or found["wrong"]:
        raise SystemExit("answers were lost or wrong")


class BrokenStreamError(Exception):
    """A stream ended with an error after its first words: its replica was killed."""


@contextmanager
def served(command: list[str], log: Path) -> Generator[tuple[str, psutil.Process]]:
    """The address and the process of a service."""
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (address := re.search(r"^http://\S+$", log.read_text(), re.MULTILINE)):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        yield address[0], process
    finally:
        process.terminate()
        process.wait(60)


def replicas_of(service: psutil.Process) -> list[psutil.Process]:
    """Processes of the replicas of a service; Ray writes their deployment into the command line."""
    found: list[psutil.Process] = []
    for process in service.children(recursive=True):
        with suppress(psutil.Error):
            if "ServeReplica:foveate-" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Soak:
    """Requests to a service, and what happens around them.

    Args:
        address: Address of the service.
        service: Its process.
        index: Folder of its index.
        folder: Folder for files.
        questions: What clients ask.
    """

    def __init__(self, address: str, service: psutil.Process, index: Path, folder: Path, questions: list[str]) -> None:
        self.http = httpx.Client(base_url=address, timeout=300, limits=httpx.Limits(max_connections=None))
        self.service, self.index, self.folder = service, index, folder
        self.counts, self.seconds, self.first, self.lock = Counter[str](), list[float](), list[float](), Lock()
        self.alone = {question: self.answer(question) for question in questions}

    def run(self, minutes: float, clients: int, seed: int) -> dict[str, Any]:
        """Let clients ask until the time is over."""
        self.counts = Counter[str](lost=0, wrong=0)
        self.end = time.monotonic() + 60 * minutes
        memory: list[int] = []
        with ThreadPoolExecutor(clients + 1) as pool:
            working = [pool.submit(self.client, random.Random(seed + i)) for i in range(clients)]
            working.append(pool.submit(self.events))
            while time.monotonic() < self.end:
                memory.append(self.memory())
                time.sleep(1)
            for each in working:
                each.result()
        quarter = len(memory) // 4
        return {
            **self.counts,
            **{f"seconds_p{p}": quantiles(self.seconds, n=100)[p - 1] for p in (50, 99)},
            **{f"first_words_p{p}": quantiles(self.first, n=100)[p - 1] for p in (50, 99)},
            "memory_mb_second_quarter": max(memory[quarter : 2 * quarter]) / 2**20,
            "memory_mb_last_quarter": max(memory[-quarter:]) / 2**20,
        }

    def count(self, name: str, more: int = 1) -> None:
        """Count something that happened."""
        with self.lock:
            self.counts[name] += more

    def client(self, chance: random.Random) -> None:
        """Ask one question after another: some streamed, some given up after the first words."""
        while time.monotonic() < self.end:
            question, way = chance.choice([*self.alone]), chance.choices(["whole", "streamed", "left"], [5, 3, 2])[0]
            began = time.monotonic()
            try:
                answer = self.answer(question) if way == "whole" else self.streamed(question, leave=way == "left")
            except BrokenStreamError:
                self.count("streams that broke off")
                continue
            except (httpx.HTTPError, RuntimeError) as error:
                self.count("lost")
                print(f"lost: {error!r}", flush=True)
                continue
            self.count(way)
            if way != "left":
                self.seconds.append(time.monotonic() - began)
                self.count("wrong", answer != self.alone[question])

    def answer(self, question: str) -> str:
        """The answer to a question; a full queue is tried again."""
        while (reply := self.http.post(URL, json=body(question))).status_code == 429:
            self.count("tried again")
            time.sleep(float(reply.headers["Retry-After"]))
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.text[:200]}")
        return reply.json()["choices"][0]["message"]["content"]

    def streamed(self, question: str, leave: bool) -> str:
        """The pieces of a streamed answer; with `leave`, the connection is closed after the first."""
        began, pieces = time.monotonic(), list[str]()
        while not pieces:
            with self.http.stream("POST", URL, json=body(question, stream=True)) as stream:
                if stream.status_code == 429:
                    self.count("tried again")
                    time.sleep(float(stream.headers["Retry-After"]))
                    continue
                for line in stream.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise (BrokenStreamError if pieces else RuntimeError)(event["error"])
                    if piece := (event["choices"] or [{"delta": {}}])[0]["delta"].get("content"):
                        if not pieces:
                            self.first.append(time.monotonic() - began)
                        pieces.append(piece)
                        if leave:
                            break
        return "".join(pieces)

    def events(self) -> None:
        """Kill a replica, add and remove a document, and fill the disk, in turn."""
        turns: list[Callable[[], None]] = [self.kill, self.add, self.remove, self.fill]
        for event in cycle(turns):
            for _ in range(EVENT_SECONDS):
                if time.monotonic() > self.end:
                    return
                time.sleep(1)
            event()
            self.count(f"events: {event.__name__}")

    def kill(self) -> None:
        """Kill a replica."""
        if found := replicas_of(self.service):
            with suppress(psutil.Error):
                found[0].kill()

    def add(self) -> None:
        """Add a document to the index of the running service."""
        (self.folder / "more.txt").write_text(UNRELATED)
        self._command("add", "more.txt", "--device", "cpu")

    def remove(self) -> None:
        """Remove it again."""
        self._command("remove", "more.txt")

    def fill(self) -> None:
        """Fill the disk of the index for some seconds, if it is small."""
        filler = self.index / "filler"
        if shutil.disk_usage(self.index).free > SMALL_DISK:
            return
        try:
            with filler.open("wb") as file:
                while True:
                    file.write(bytes(2**16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.count("full disks")
        time.sleep(EVENT_SECONDS / 3)
        filler.unlink()

    def _command(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "foveate", "rag", name, str(self.index), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def memory(self) -> int:
        """Bytes that the service and its replicas use."""
        used = 0
        for process in [self.service, *replicas_of(self.service)]:
            with suppress(psutil.Error):
                used += process.memory_info().rss
        return used


def body(question: str, **options: Any) -> dict[str, Any]:
    """A request."""
    return {"messages": [{"role": "user", "content": question}], **options}


if __name__ == "__main__":
    typer.run(main)
