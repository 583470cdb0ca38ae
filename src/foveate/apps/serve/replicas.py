# pyright: basic
"""Replicas on Ray Serve, each a process with a model, to which this process passes requests."""

import asyncio
import logging
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import ray
from fastapi import HTTPException
from ray import serve

from foveate.utils.files import slug

__all__ = ["RETRIES", "count_replicas", "running"]

RETRIES = 3
"""Largest number of restarts of a request whose replica died, so that a crashing request ends."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for answers in transit."""


@contextmanager
def running(
    replica: type,
    replica_args: Mapping[str, Mapping[str, Any]],
    *,
    batch: int,
    queue: int,
    replicas: tuple[int, int] = (1, 1),
    address: str = "",
    gpu: bool = False,
) -> Generator[dict[str, Any]]:
    """Start replicas, and stop them when the `with` block ends. Yields Ray's handle of the replicas of each name.

    Args:
        replica: Class of the replicas. Ray replaces a replica whose method `check_health` raises an error.
        replica_args: Keyword arguments of `replica` by name. Each name, such as a method, gets its own replicas.
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
        serve.start(proxy_location="Disabled", logging_config=quiet)
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
        targets = [
            serve.RunTarget(kind.bind(**given), _application(name), None, quiet)
            for name, given in replica_args.items()
        ]
        try:
            handles = serve.run_many(targets)
        except RuntimeError as error:
            raise ValueError(f"the service did not start: {error}") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns of every request that the queue refuses
        yield dict(zip(replica_args, handles, strict=True))
    finally:
        if address:
            for name in replica_args:
                serve.delete(_application(name))
        else:
            serve.shutdown()
        ray.shutdown()


async def count_replicas(names: Iterable[str]) -> dict[str, int]:
    """Number of running replicas of each kind.

    Raises:
        HTTPException: If a kind has none.
    """
    status = await asyncio.to_thread(serve.status)
    found = dict.fromkeys(names, 0)
    for name in found:
        for deployment in status.applications[_application(name)].deployments.values():
            found[name] += sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")
    if not all(found.values()):
        raise HTTPException(503, f"no replica is running for {', '.join(m for m, n in found.items() if not n)}")
    return found


def _application(name: str) -> str:
    return f"foveate-{slug(name)[:30]}-{crc32(name.encode()):08x}"
