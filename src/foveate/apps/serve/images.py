# pyright: basic
"""Pictures over HTTP as OpenAI's API defines it, drawn by replicas on Ray Serve."""

import asyncio
import base64
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import HTTPException, Response
from fastapi import Request as HTTPRequest
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from foveate.apps.serve.http import create_app, overloaded, until_gone
from foveate.apps.serve.replicas import RETRIES, count_replicas

__all__ = ["ImageFront", "Limits"]

MAX_BODY = 2**16
MAX_PROMPT = 8192
MOST_SEEDS = 2**63
KEPT = 2**28
"""Bytes of pictures that can be fetched by their URL; the oldest go first."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests may ask for, and what they get unless they say otherwise.

    Attributes:
        steps: Number of denoising steps of requests that do not say.
        max_side: Largest width and height in pixels.
        max_steps: Largest number of denoising steps.
        max_n: Most pictures of a request.
        timeout: Seconds after which a request is given up.
    """

    steps: int
    max_side: int
    max_steps: int
    max_n: int
    timeout: float


@serve.ingress()
class ImageFront:
    """The HTTP side: checks requests and hands their pictures to replicas."""

    def __init__(self, model: str, key: str, limits: Limits, replicas: dict[str, Any]) -> None:
        self._model, self._key, self._limits, self._replicas = model, key, limits, replicas
        self._kept: dict[str, bytes] = {}
        self._registry = CollectorRegistry()
        self._drawn = Counter("foveate_pictures", "Pictures drawn, by method.", ["method"], registry=self._registry)
        self._retried = Counter(
            "foveate_retries", "Pictures begun again because a replica died.", registry=self._registry
        )

    def __serve_build_asgi_app__(self) -> Any:
        limits, default = self._limits, next(iter(self._replicas))
        app, api = create_app(
            "Foveate: images", self._model, key=self._key, max_body=MAX_BODY, timeout=limits.timeout,
            registry=self._registry, health=self._health,
        )  # fmt: skip

        class Generation(BaseModel, extra="forbid"):
            prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
            model: Literal[self._model] | None = None  # pyright: ignore
            method: Literal[*self._replicas] = default  # pyright: ignore
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
            drawing = self._replicas[method].draw.remote(*asked)
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
        return {"replicas": await count_replicas(self._replicas)}
