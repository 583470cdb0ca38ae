"""Common parts of both services: API keys, request limits, deadlines, metrics, and errors in OpenAI's format."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from secrets import compare_digest
from time import perf_counter
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException

__all__ = ["api_key", "create_app", "overloaded", "until_gone"]

KEY = "FOVEATE_API_KEY"
LOOPBACK = "127.0.0.1", "localhost", "::1"
BODY_SECONDS = 30
"""Time in which the body of a request must arrive."""
CLIENT_LEFT = 499
"""Status of a request whose client has left, in metrics and logs, as in nginx."""
Result = TypeVar("Result")


def api_key(host: str) -> str:
    """The API key of the service, from the environment; empty for none.

    Raises:
        ValueError: If there is no key, and other machines can reach the service.
    """
    key = os.environ.get(KEY, "")
    if not key and host not in LOOPBACK:
        raise ValueError(f"--host {host} lets other machines in: set {KEY} to an API key for them")
    return key


Health = Callable[[], Awaitable[dict[str, Any]]]


def create_app(
    title: str,
    model: str,
    *,
    key: str,
    max_body: int,
    timeout: float,
    registry: CollectorRegistry,
    health: Health,
    ready: Health | None = None,
    origins: Sequence[str] = (),
) -> tuple[FastAPI, APIRouter]:
    """Create an application with /health, /ready, /metrics, /docs and /v1/models, and the router for the rest of /v1.

    The key is checked before the body of a request is read.

    Args:
        title: Title of the documentation.
        model: Name of the model.
        key: API key for /v1 and /metrics; empty for none.
        max_body: Largest number of bytes in the body of a request.
        timeout: Seconds after which a request is cancelled.
        registry: Registry of the metrics.
        health: Returns further fields for /health; raises an HTTPException if the service must be restarted.
        ready: The same for /ready; raises one also if a request should go elsewhere for now. None is `health`.
        origins: Origins of web pages whose scripts may use the service (CORS); "*" lets all.
    """
    app = FastAPI(title=title, redoc_url=None)
    app.add_middleware(_Watch, max_body=max_body, timeout=timeout, registry=registry)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failed)

    class Keyed(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                scheme, sent = get_authorization_scheme_param(request.headers.get("authorization"))
                if key and not (scheme.lower() == "bearer" and compare_digest(sent.encode(), key.encode())):
                    raise HTTPException(
                        401, "send the API key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
                    )
                return await handle(request)

            return checked

    described = Depends(HTTPBearer(auto_error=False))  # for /docs
    router = APIRouter(route_class=Keyed, dependencies=[described])

    for path, state, about in (
        ("/health", health, "Whether the service works: 200, or 503 if it must be restarted."),
        ("/ready", ready or health, "Whether it takes a request now: 200 or 503."),
    ):
        app.get(path, description=about)(_status(state))
        app.head(path, include_in_schema=False)(_status(state))

    @router.get("/metrics")
    async def _metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    about = {"id": model, "object": "model", "created": 0, "owned_by": "foveate"}

    @router.get("/v1/models")
    async def _models() -> dict[str, Any]:
        """The model of this service."""
        return {"object": "list", "data": [about]}

    @router.get("/v1/models/{name:path}")
    async def _model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        if name != model:
            raise HTTPException(404, f"the only model here is {model!r}")
        return about

    return app, router


def _status(state: Health) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def status() -> dict[str, Any]:
        return {"status": "ok", **await state()}

    return status


def overloaded(seconds: int = 1) -> HTTPException:
    """Error response for a full queue."""
    return HTTPException(429, "the queue is full: try again later", {"Retry-After": str(seconds)})


async def until_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; cancel it when the client leaves. The body must have been read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_LEFT, "the client did not wait")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


class _Watch:
    """Middleware that counts and times requests, refuses long bodies, and enforces the deadline."""

    def __init__(self, app: Any, max_body: int, timeout: float, registry: CollectorRegistry) -> None:
        self._app, self._max_body, self._timeout = app, max_body, timeout
        self._requests = Counter(
            "foveate_requests", "Answered requests, by route and status.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "foveate_request_seconds", "Duration of requests in seconds.", ["route"], registry=registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )  # fmt: skip
        self._running = Gauge("foveate_requests_in_progress", "Requests in progress.", registry=registry)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, size, complete, began = CLIENT_LEFT, 0, False, perf_counter()

        async def bounded() -> Any:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(began + BODY_SECONDS - perf_counter()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS} s") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body")
            if size > self._max_body:
                raise HTTPException(413, f"the body has more than {self._max_body} bytes")
            return message

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with self._running.track_inprogress():
                async with asyncio.timeout(self._timeout):
                    await self._app(scope, bounded, watched)
        except TimeoutError:
            if status != CLIENT_LEFT:  # the answer has begun: an incomplete one tells the client
                raise
            await _error(504, f"not finished within {self._timeout:g} s")(scope, receive, watched)
        except Exception:
            status = 500  # answered outside
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, status).inc()
            self._seconds.labels(route).observe(perf_counter() - began)


def _error(status: int, message: str, headers: Any = None, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": body}, status, headers)


async def _refused(_request: Request, error: Any) -> JSONResponse:
    return _error(error.status_code, str(error.detail), error.headers)


async def _invalid(_request: Request, error: Any) -> JSONResponse:
    """First error of a body, and its field."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return _error(400, f"the body is not JSON: {fault['ctx']['error']}")
    where = ".".join(str(part) for part in fault["loc"][1:])
    message = fault["msg"].encode(errors="replace").decode()
    return _error(400, f"{where}: {message}" if where else message, param=where or None)


async def _failed(_request: Request, _exc: Exception) -> JSONResponse:
    return _error(500, "the service failed; its log says why")
