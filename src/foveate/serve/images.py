# pyright: basic
"""Pictures over HTTP as OpenAI's API defines it, drawn by replicas on Ray Serve."""

import asyncio
import base64
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import ray
from fastapi import HTTPException, Response
from fastapi import Request as HTTPRequest
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from foveate.diffusers.lora import MethodLike, load_lora, using
from foveate.diffusers.pipelines import Request, check_request, draw_batch, load, own_size, unread
from foveate.serve.http import create_app, overloaded, until_gone
from foveate.utils.files import png, slug

__all__ = ["Drawing", "running"]

APPLICATION = "foveate"
MAX_BODY = 2**16
MAX_PROMPT = 8192
MOST_SEEDS = 2**63
RETRIES = 3
"""Times that a picture is drawn again because its replica died; a picture that kills replicas must stop there."""
KEPT = 256
"""Pictures that can be fetched by their URL; the oldest go first."""
OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory for pictures on their way."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a service draws with, and its limits.

    Attributes:
        model: Folder or hub id of the pipeline.
        name: Name of the model in the API.
        methods: Methods by the name that requests use; None is dense. The first one is the default.
        lora: File of a LoRA.
        device: See `foveate.utils.device.choose_device`.
        dtype: See `foveate.utils.device.choose_dtype`.
        size: Default (height, width) in pixels; None is the model's own.
        steps: Default number of denoising steps.
        batch: Most pictures of one size and number of steps that are drawn together.
        queue: Most pictures of a method that wait for a replica.
        timeout: Seconds after which a request is given up.
        max_side: Largest width and height in pixels.
        max_steps: Largest number of denoising steps.
        max_n: Most pictures of a request.
        key: Key that requests must carry; empty for none.
    """

    model: str
    name: str
    methods: dict[str, MethodLike | None]
    lora: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    size: tuple[int, int] | None = None
    steps: int = 28
    batch: int = 4
    queue: int = 64
    timeout: float = 300.0
    max_side: int = 2048
    max_steps: int = 100
    max_n: int = 4
    key: str = ""


class _Abandoned(Exception):
    """Nobody waits for any picture of the batch."""


@dataclass
class _Job:
    request: Request
    over: bool = field(default=False)  # drawn, or nobody waits for it


class Painter:
    """A replica: one pipeline with one method set."""

    def __init__(self, drawing: Drawing, method: str) -> None:
        self._pipe = load(drawing.model, drawing.device, drawing.dtype)
        if drawing.lora:
            load_lora(self._pipe, drawing.lora)
        self._method = using(self._pipe, drawing.methods[method])
        self._method.__enter__()
        self._size = drawing.size or own_size(self._pipe)
        self._about = {"model": drawing.name, "method": method}
        self._draw.set_max_batch_size(drawing.batch)

    async def draw(self, prompt: str, size: tuple[int, int] | None, steps: int, seed: int) -> bytes | str:
        """The PNG file, or why it cannot be drawn."""
        request = Request(prompt, size or self._size, steps, None, seed)
        try:
            check_request(self._pipe, request)
        except ValueError as error:
            return str(error)
        job = _Job(request)
        try:
            return await self._draw(job)
        finally:
            job.over = True

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.01)
    async def _draw(self, jobs: list[_Job]) -> list[bytes | str]:
        return await asyncio.to_thread(self._draw_together, jobs)

    def _draw_together(self, jobs: list[_Job]) -> list[bytes | str]:
        """Results in the order of the jobs. What has the same size and number of steps is one batch."""
        results: dict[int, bytes | str] = {}

        def go_on() -> None:
            if all(job.over for job in jobs):
                raise _Abandoned

        for job in jobs:
            if end := unread(self._pipe, job.request.prompt):
                results[id(job)] = f"the model does not read the end of the prompt: {end!r}; shorten it"
        rest = sorted((job for job in jobs if id(job) not in results), key=_shape)
        for _, group in groupby(rest, _shape):
            batch = list(group)
            try:
                pictures = draw_batch(self._pipe, [job.request for job in batch], go_on)
            except _Abandoned:
                break
            for job, picture in zip(batch, pictures, strict=True):
                height, width = job.request.size
                about = {"prompt": job.request.prompt, "size": f"{width} x {height} px", "seed": str(job.request.seed)}
                results[id(job)] = png(picture, about | {"steps": str(job.request.steps)} | self._about)
        return [results.get(id(job), "") for job in jobs]


def _shape(job: _Job) -> Any:
    return job.request.size, job.request.steps


@serve.ingress()
class Front:
    """The HTTP side: checks requests and hands their pictures to replicas."""

    def __init__(self, drawing: Drawing, painters: dict[str, Any]) -> None:
        self._drawing, self._painters = drawing, painters
        self._kept: dict[str, bytes] = {}
        self._registry = CollectorRegistry()
        self._drawn = Counter("foveate_pictures", "Pictures drawn, by method.", ["method"], registry=self._registry)
        self._retried = Counter(
            "foveate_retries", "Pictures begun again because a replica died.", registry=self._registry
        )

    def __serve_build_asgi_app__(self) -> Any:
        drawing = self._drawing
        app, api = create_app(
            "Foveate: images", drawing.name, key=drawing.key, max_body=MAX_BODY, timeout=drawing.timeout,
            registry=self._registry, health=self._health,
        )  # fmt: skip
        methods, default = Literal[*drawing.methods], next(iter(drawing.methods))

        class Generation(BaseModel, extra="forbid"):
            prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
            model: Literal[drawing.name] | None = None  # pyright: ignore
            method: methods = default  # pyright: ignore
            n: Annotated[int, Field(ge=1, le=drawing.max_n)] = 1
            size: Annotated[str, Field(pattern=r"^([1-9]\d{0,5}x[1-9]\d{0,5}|auto)$")] = "auto"
            steps: Annotated[int, Field(ge=1, le=drawing.max_steps)] = drawing.steps
            seed: Annotated[int, Field(ge=0, lt=MOST_SEEDS)] | None = None
            response_format: Literal["b64_json", "url"] = "b64_json"
            user: str | None = None

        @api.post("/v1/images/generations")
        async def _generations(asked: Generation, http: HTTPRequest) -> dict[str, Any]:
            """Pictures of a prompt. Picture i of n has seed + i; the same seed gives the same picture."""
            size = None if asked.size == "auto" else tuple(int(side) for side in reversed(asked.size.split("x")))
            if max(size or (1,)) > drawing.max_side:
                raise HTTPException(400, f"{asked.size}: a side has at most {drawing.max_side} px here")
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
                raise HTTPException(404, f"no such picture: only the last {KEPT} are kept")
            return Response(self._kept[name], media_type="image/png")

        app.include_router(api)
        return app

    def _answer(self, picture: bytes, form: str, http: HTTPRequest) -> dict[str, str]:
        if form == "b64_json":
            return {"b64_json": base64.b64encode(picture).decode()}
        self._kept[name := f"{secrets.token_urlsafe()}.png"] = picture
        while len(self._kept) > KEPT:
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
        for attempt in range(RETRIES + 1):
            try:
                result = await self._painters[method].draw.remote(*asked)
            except BackPressureError:
                raise overloaded() from None
            except (RayActorError, DeploymentUnavailableError):
                self._retried.inc()
                await asyncio.sleep(0.2 * 2**attempt)  # until Ray knows that it died
            else:
                if isinstance(result, str):
                    raise HTTPException(400, result)
                self._drawn.labels(method).inc()
                return result
        raise HTTPException(503, f"the replicas died {RETRIES + 1} times while they drew this")

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
    return f"draws-{slug(method)}"


@contextmanager
def running(
    drawing: Drawing, host: str, port: int, *, address: str = "", replicas: tuple[int, int] = (1, 1), gpu: bool = False
) -> Generator[None]:
    """Context in which the service runs.

    Args:
        drawing: What it draws with.
        host: Address to listen on.
        port: Port to listen on.
        address: Address of a Ray cluster; empty starts Ray on this machine.
        replicas: Fewest and most replicas of each method; their number follows the requests in progress.
        gpu: Whether each replica has a GPU of its own.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing to anybody
    fewest, most = replicas
    cores, needed = os.cpu_count() or 1, most * len(drawing.methods)
    threads = 1 if gpu else max(1, cores // needed)
    if address:
        ray.init(address=address)
    else:
        ray.init(
            num_cpus=max(cores, threads * needed), include_dashboard=False, object_store_memory=OBJECT_STORE,
            logging_level="warning",
        )  # fmt: skip
    try:
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly", logging_config=quiet)
        scale: Any = {"num_replicas": fewest}
        if most > fewest:
            limits = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": drawing.batch}
            scale = {"autoscaling_config": limits}
        painters = {
            method: serve.deployment(Painter)
            .options(
                name=_deployment(method),
                max_ongoing_requests=2 * drawing.batch,  # one batch is drawn while the next one gathers
                max_queued_requests=drawing.queue,
                ray_actor_options={"num_cpus": threads, "num_gpus": int(gpu)},
                **scale,
            )
            .bind(drawing, method)
            for method in drawing.methods
        }
        front = serve.deployment(Front).options(
            max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0, "num_gpus": 0}
        )
        serve.run(front.bind(drawing, painters), name=APPLICATION, logging_config=quiet)
        yield
    finally:
        if not address:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()
