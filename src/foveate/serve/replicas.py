# pyright: basic
"""Replicas on Ray Serve behind one front, which answers HTTP. Both services run so."""

import asyncio
import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import ray
from fastapi import HTTPException
from ray import serve

from foveate.utils.files import slug

__all__ = ["RETRIES", "count_replicas", "running"]

APPLICATION = "foveate"
RETRIES = 3
"""Times that work is begun again because its replica died; work that kills replicas must stop there."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for answers on their way."""


@contextmanager
def running(
    front: type,
    arguments: Sequence[Any],
    replica: type,
    options: Mapping[str, Mapping[str, Any]],
    *,
    host: str,
    port: int,
    batch: int,
    queue: int,
    replicas: tuple[int, int] = (1, 1),
    address: str = "",
    gpu: bool = False,
) -> Generator[None]:
    """Context in which a service runs.

    Args:
        front: Class that answers HTTP, made with `arguments` and the handles of the replicas by name.
        arguments: First arguments of `front`.
        replica: Class of the replicas.
        options: Arguments of `replica` for each kind of replica, by name.
        host: Address to listen on.
        port: Port to listen on.
        batch: Most requests that a replica answers together.
        queue: Most requests of each kind that wait for a replica.
        replicas: Fewest and most replicas of each kind.
        address: Address of a Ray cluster; empty starts Ray on this machine.
        gpu: Whether each replica has a GPU of its own.

    Raises:
        ValueError: If the replicas cannot start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    os.environ.setdefault("RAY_worker_niceness", "0")  # replicas are what this machine is for
    fewest, most = replicas
    cores, needed = os.cpu_count() or 1, most * len(options)
    threads = 1 if gpu else max(1, cores // needed)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    if address:
        ray.init(address=address, logging_level=logging.WARNING)
    else:
        cores = max(cores, threads * needed)
        ray.init(
            num_cpus=cores, object_store_memory=OBJECT_STORE, include_dashboard=False, logging_level=logging.WARNING
        )
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly", logging_config=quiet)
        scale: Any = {"num_replicas": fewest}
        if most > fewest:
            wanted = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": batch}
            scale = {"autoscaling_config": wanted}
        kind = serve.deployment(replica).options(
            max_ongoing_requests=2 * batch,  # one batch is answered while the next one gathers
            max_queued_requests=queue,
            ray_actor_options={"num_cpus": threads, "num_gpus": int(gpu)},
            **scale,
        )
        bound = {name: kind.options(name=_deployment(name)).bind(**given) for name, given in options.items()}
        http = serve.deployment(front).options(
            max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0},
            logging_config=quiet | {"log_level": "ERROR"},  # Ray warns of every request that the queue refuses
        )
        try:
            serve.run(http.bind(*arguments, bound), name=APPLICATION, logging_config=quiet)
        except RuntimeError as error:
            raise ValueError(f"the service did not start: {error}") from error
        yield
    finally:
        if address:
            serve.delete(APPLICATION)
        else:
            serve.shutdown()
        ray.shutdown()


async def count_replicas(names: Iterable[str]) -> dict[str, int]:
    """How many replicas of each kind are running.

    Raises:
        HTTPException: If there is none of some kind.
    """
    status = await asyncio.to_thread(serve.status)
    deployments = status.applications[APPLICATION].deployments
    states = {name: deployments[_deployment(name)].replica_states for name in names}
    running = {name: sum(n for state, n in found.items() if state == "RUNNING") for name, found in states.items()}
    if not all(running.values()):
        raise HTTPException(503, f"no replica is running for {', '.join(m for m, n in running.items() if not n)}")
    return running


def _deployment(name: str) -> str:
    return f"replica-{slug(name)[:30]}-{crc32(name.encode()):08x}"
