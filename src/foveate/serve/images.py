# pyright: basic
"""Pictures over HTTP as OpenAI's API defines it, drawn by replicas on Ray Serve."""

import asyncio
import base64
import logging
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from zlib import crc32

import ray
from fastapi import HTTPException, Response
from fastapi import Request as HTTPRequest
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from foveate.serve.http import create_app, overloaded, until_gone
from foveate.utils.files import slug

__all__ = ["Limits", "running"]

APPLICATION = "foveate"
MAX_BODY = 2**16
MAX_PROMPT = 8192
MOST_SEEDS = 2**63
RETRIES = 3
"""Times that a picture is drawn again because its replica died; a picture that kills replicas must stop there."""
KEPT = 2**28
"""Bytes of pictures that can be fetched by their URL; the oldest go first."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for pictures on their way."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests may ask for, and what they get unless they say otherwise.

    Attributes:
        steps: Number of denoising steps of requests that do not say.
        max_side: Largest width and height in pixels.
        max_steps: Largest number of denoising steps.
        max_n: Most pictures of a request.
        queue: Most pictures of a method that wait for a replica.
        timeout: Seconds after which a request is given up.
    """

    steps: int
    max_side: int
    max_steps: int
    max_n: int
    queue: int
    timeout: float


@serve.ingress()
class Front:
    """The HTTP side: checks requests and hands their pictures to replicas."""

    def __init__(self, model: str, key: str, limits: Limits, painters: dict[str, Any]) -> None:
        self._model, self._key, self._limits, self._painters = model, key, limits, painters
        self._kept: dict[str, bytes] = {}
        self._registry = CollectorRegistry()
        self._drawn = Counter("foveate_pictures", "Pictures drawn, by method.", ["method"], registry=self._registry)
        self._retried = Counter(
            "foveate_retries", "Pictures begun again because a replica died.", registry=self._registry
        )

    def __serve_build_asgi_app__(self) -> Any:
        limits, default = self._limits, next(iter(self._painters))
        app, api = create_app(
            "Foveate: images", self._model, key=self._key, max_body=MAX_BODY, timeout=limits.timeout,
            registry=self._registry, health=self._health,
        )  # fmt: skip

        class Generation(BaseModel, extra="forbid"):
            prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
            model: Literal[self._model] | None = None  # pyright: ignore
            method: Literal[*self._painters] = default  # pyright: ignore
            n: Annotated[int, Field(ge=1, le=limits.max_n)] = 1
            size: Annotated[str, Field(pattern=r"^([1-9]\d{0,5}x[1-9]\d{0,5}|auto)$")] = "auto"
            steps: Annotated[int, Field(ge=1, le=limits.max_steps)] = limits.steps
            seed: Annotated[int, Field(ge=0, lt=MOST_SEEDS)] | None = None
            response_format: Literal["b64_json", "url"] = "b64_json"
            user: str | None = None

        @api.post("/v1/images/generations")
        async def _generations(asked: Generation, http: HTTPRequest) -> dict[str, Any]:
            """Pictures of a prompt. Picture i of n has seed + i; the same seed gives the same picture."""
            size = None if asked.size == "auto" else tuple(int(side) for side in reversed(asked.size.split("x")))
            if max(size or (1,)) > limits.max_side:
                raise HTTPException(400, f"{asked.size}: a side has at most {limits.max_side} px here")
            first = secrets.randbelow(2**31) if asked.seed is None else asked.seed
            seeds = [(first + i) % MOST_SEEDS for i in range(asked.n)]
            work = self._draw_all(asked.method, [(asked.prompt, size, asked.steps, seed) for seed in seeds])
            data = [
                {"seed": seed} | self._answer(picture, asked.response_format, http)
                for picture, seed in zip(await until_gone(http, work), seeds, strict=True)
            ]
            return {"created": int(time.time()), "data": data}

        @app.get("/pictures/{name}")
        async def _picture(name: str) -> Response:
            """A picture by the URL that was its answer. Only who has the URL can know the name."""
            if name not in self._kept:
                raise HTTPException(404, "no such picture: only the last ones are kept")
            return Response(self._kept[name], media_type="image/png")

        app.include_router(api)
        return app

    def _answer(self, picture: bytes, form: str, http: HTTPRequest) -> dict[str, str]:
        if form == "b64_json":
            return {"b64_json": base64.b64encode(picture).decode()}
        self._kept[name := f"{secrets.token_urlsafe()}.png"] = picture
        while sum(map(len, self._kept.values())) > KEPT:
            self._kept.pop(next(iter(self._kept)))
        return {"url": f"{http.base_url}pictures/{name}"}

    async def _draw_all(self, method: str, asked: list[Any]) -> list[bytes]:
        tasks = [asyncio.ensure_future(self._draw(method, *each)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _draw(self, method: str, *asked: Any) -> bytes:
        """The picture, from another replica if the first one dies."""
        deaths = 0
        while deaths <= RETRIES:
            drawing = self._painters[method].draw.remote(*asked)
            try:
                result = await drawing
            except asyncio.CancelledError:
                drawing.cancel()
                raise
            except BackPressureError:
                if not deaths:
                    raise overloaded() from None
                await asyncio.sleep(0.5)  # it has waited in the queue before
            except RayActorError:
                deaths += 1
                self._retried.inc()
                await asyncio.sleep(0.1)  # until Ray knows that it died
            else:
                if isinstance(result, str):
                    raise HTTPException(400, result)
                self._drawn.labels(method).inc()
                return result
        raise HTTPException(503, f"{deaths} replicas died while they drew this")

    async def _health(self) -> dict[str, Any]:
        status = await asyncio.to_thread(serve.status)
        deployments = status.applications[APPLICATION].deployments
        replicas = {
            method: sum(
                number
                for state, number in deployments[_deployment(method)].replica_states.items()
                if state == "RUNNING"
            )
            for method in self._painters
        }
        if not all(replicas.values()):
            raise HTTPException(503, f"no replica is running for {', '.join(m for m, n in replicas.items() if not n)}")
        return {"replicas": replicas}


def _deployment(method: str) -> str:
    return f"draws-{slug(method)[:30]}-{crc32(method.encode()):08x}"


@contextmanager
def running(
    model: str,
    painters: dict[str, tuple[Any, ...]],
    limits: Limits,
    *,
    host: str,
    port: int,
    key: str = "",
    batch: int = 4,
    address: str = "",
    replicas: tuple[int, int] = (1, 1),
    gpu: bool = False,
    **options: Any,
) -> Generator[None]:
    """Context in which the service runs.

    Args:
        model: Name of the model in the API.
        painters: First arguments of `Painter` by the name of the method in requests. The first one is the default.
        limits: Limits of requests.
        host: Address to listen on.
        port: Port to listen on.
        key: Key that requests must carry; empty for none.
        batch: Most pictures that a replica draws together.
        address: Address of a Ray cluster; empty starts Ray on this machine.
        replicas: Fewest and most replicas of each method; their number follows the requests in progress.
        gpu: Whether each replica has a GPU of its own.
        **options: Other arguments of every `Painter`.

    Raises:
        ValueError: If the replicas cannot start.
    """
    from foveate.serve.painter import Replica  # the front needs none of what it loads

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    os.environ.setdefault("RAY_worker_niceness", "0")  # replicas are what this machine is for
    fewest, most = replicas
    cores, needed = os.cpu_count() or 1, most * len(painters)
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
        kind = serve.deployment(Replica).options(
            max_ongoing_requests=2 * batch,  # one batch is drawn while the next one gathers
            max_queued_requests=limits.queue,
            ray_actor_options={"num_cpus": threads, "num_gpus": int(gpu)},
            **scale,
        )
        bound = {
            method: kind.options(name=_deployment(method)).bind(*first, batch=batch, **options)
            for method, first in painters.items()
        }
        front = serve.deployment(Front).options(
            max_ongoing_requests=10_000,
            ray_actor_options={"num_cpus": 0},
            logging_config=quiet | {"log_level": "ERROR"},  # Ray warns of every request that the queue refuses
        )
        try:
            serve.run(front.bind(model, key, limits, bound), name=APPLICATION, logging_config=quiet)
        except RuntimeError as error:
            raise ValueError(f"the service did not start: {error}") from error
        yield
    finally:
        if address:
            serve.delete(APPLICATION)
        else:
            serve.shutdown()
        ray.shutdown()
