# pyright: basic
"""Images a second of `foveate serve` with more and more replicas, and requests lost when one of them is killed.

python -m lab.bench.replicas lab/results/replicas-cuda.json --replicas 1,2,4
python -m lab.bench.replicas replicas.json --size 64x64 --steps 1 --requests 40 --device cpu     # a CPU
"""

import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from foveate.apps.console import numbers
from foveate.utils.device import versions
from foveate.utils.files import write_whole
from lab.bench.soak_documents import served
from lab.quality.common import Commit

PROMPT = "a red apple above a blue car on a green background"


def main(
    out: Annotated[Path, typer.Argument(help="JSON file of the result.")],
    replicas: Annotated[str, typer.Option(help="Numbers of replicas; one runs on each GPU.")] = "1,2",
    requests: int = 200,
    clients: int = 32,
    size: str = "512x512",
    steps: int = 20,
    method: str = "dense",
    device: str = "auto",
    commit: Commit = "",
) -> None:
    """Measure each number of replicas, and write the result."""
    settings = {"requests": requests, "clients": clients, "size": size, "steps": steps, "method": method}
    rows: list[dict[str, Any]] = []
    for number in numbers(replicas):
        options = f"--steps {steps} --method {method} --device {device} --port 0 --timeout 600"
        command = [sys.executable, "-m", "foveate", "serve", "--replicas", str(number), *options.split()]
        with TemporaryDirectory() as folder, served(command, Path(folder) / "log") as (address, service):
            load = Load(address, service, size, clients)
            load.wait_for(number)
            load.run(max(2 * number, clients))  # warms up
            row = {"replicas": number, **load.run(requests)}
            if number > 1:
                row |= {f"killed_{name}": value for name, value in load.run(requests, kill=requests // 4).items()}
        rows.append(row)
        print(row, flush=True)
        about = {"settings": settings, "versions": versions() | ({"commit": commit} if commit else {})}
        write_whole(out, json.dumps({**about, "rows": rows}, indent=2).encode() + b"\n")


class Load:
    """Clients of an image service.

    Args:
        address: Address of the service.
        service: Its process.
        size: Size of an image.
        clients: Number of clients.
    """

    def __init__(self, address: str, service: psutil.Process, size: str, clients: int) -> None:
        self.http = httpx.Client(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None))
        self.service, self.size, self.clients = service, size, clients

    def wait_for(self, replicas: int) -> None:
        """Wait until so many replicas are ready."""
        while sum(self.http.get("/health").json().get("replicas", {}).values()) < replicas:
            time.sleep(0.2)

    def run(self, requests: int, kill: int = 0) -> dict[str, float]:
        """Send requests, and kill a replica after so many answers. A client that is asked to come again does so."""
        done, statuses, seconds = count(1), Counter[int](), list[float]()

        def ask(seed: int) -> None:
            began = time.monotonic()
            while True:
                request = {"prompt": PROMPT, "seed": seed, "size": self.size}
                answer = self.http.post("/v1/images/generations", json=request)
                if answer.status_code != 429:
                    break
                time.sleep(float(answer.headers["Retry-After"]) * random.random())
            statuses[answer.status_code] += 1
            seconds.append(time.monotonic() - began)
            if next(done) == kill:
                self.replicas()[0].kill()

        began = time.monotonic()
        with ThreadPoolExecutor(self.clients) as pool:
            list(pool.map(ask, range(requests)))
        taken = time.monotonic() - began
        times = {f"seconds_p{p}": quantiles(seconds, n=100)[p - 1] for p in (50, 99)}
        return {"images_per_s": requests / taken, "lost": requests - statuses[200], **times}

    def replicas(self) -> list[psutil.Process]:
        """Processes of the replicas; Ray writes their deployment into the command line."""
        children = self.service.children(recursive=True)
        return [process for process in children if "ServeReplica:foveate-" in " ".join(process.cmdline())]


if __name__ == "__main__":
    typer.run(main)
