# pyright: basic
"""Services on Ray Serve: one front answers HTTP and passes requests to replicas with the model."""

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
"""Largest number of restarts of a request whose replica died, so that a crashing request ends."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for answers in transit."""


@contextmanager
def running(
    front: type,
    front_args: Sequence[Any],
    replica: type,
    replica_args: Mapping[str, Mapping[str, Any]],
    *,
    host: str,
    port: int,
    batch: int,
    queue: int,
    replicas: tuple[int, int] = (1, 1),
    address: str = "",
    gpu: bool = False,
) -> Generator[None]:
    """Start a service, and stop it when the `with` block ends.

    Args:
        front: Class that answers HTTP. Its last argument is a dict with Ray's handle of the replicas of each name.
        front_args: The other arguments of `front`.
        replica: Class of the replicas.
        replica_args: Keyword arguments of `replica` by name. Each name, such as a method, gets its own replicas.
        host: Address to listen on.
        port: Port to listen on.
        batch: Largest number of requests that a replica answers together.
        queue: Largest number of requests of a name that wait until one of its replicas is free; more are refused.
        replicas: Smallest and largest number of replicas of each name.
        address: Address of a Ray cluster; empty starts Ray on this machine.
        gpu: Whether each replica gets one GPU.

    Raises:
        ValueError: If the replicas cannot start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    os.environ.setdefault("RAY_worker_niceness", "0")  # replicas are what this machine is for
    fewest, most = replicas
    cores, needed = os.cpu_count() or 1, most * len(replica_args)
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
        bound = {name: kind.options(name=_deployment(name)).bind(**given) for name, given in replica_args.items()}
        http = serve.deployment(front).options(
            max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0},
            logging_config=quiet | {"log_level": "ERROR"},  # Ray warns of every request that the queue refuses
        )
        try:
            serve.run(http.bind(*front_args, bound), name=APPLICATION, logging_config=quiet)
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
    """Number of running replicas of each kind.

    Raises:
        HTTPException: If a kind has none.
    """
    status = await asyncio.to_thread(serve.status)
    deployments = status.applications[APPLICATION].deployments
    states = {name: deployments[_deployment(name)].replica_states for name in names}
    found = {name: sum(n for state, n in each.items() if state == "RUNNING") for name, each in states.items()}
    if not all(found.values()):
        raise HTTPException(503, f"no replica is running for {', '.join(m for m, n in found.items() if not n)}")
    return found


def _deployment(name: str) -> str:
    return f"replica-{slug(name)[:30]}-{crc32(name.encode()):08x}"
