"""Laws of what both services share: keys, bounds, deadlines, and errors in OpenAI's format."""

import asyncio

import httpx
import pytest
from fastapi import Request
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field

from foveate.apps.cli.common import free_port
from foveate.apps.serve import http
from foveate.apps.serve.http import api_key, create_app, overloaded, until_gone

KEY = {"Authorization": "Bearer secret"}


class Asked(BaseModel, extra="forbid"):
    work: str = Field(max_length=5)


async def status():
    return {"replicas": 2}


def service(**options):
    """An application whose work may wait, fail or be refused."""
    app, api = create_app(
        "t", "model", key="secret", max_body=100, timeout=0.2, registry=CollectorRegistry(), health=status,
        **options,
    )  # fmt: skip
    cancelled = []

    async def work(name):
        try:
            await asyncio.sleep(60 if name == "wait" else 0)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise
        if name == "full":
            raise overloaded()
        return {"done": 1 // (name != "fail")}

    @api.post("/v1/work")
    async def _work(asked: Asked, http: Request):
        return await until_gone(http, work(asked.work))

    app.include_router(api)
    return app, cancelled


def answers(*requests, **options):
    """Answers to requests, each (method, path, arguments), of one application; and what it cancelled."""
    app, cancelled = service(**options)

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(ask()), cancelled


def post(content, **headers):
    return "POST", "/v1/work", {"content": content, "headers": KEY | {"content-type": "application/json"} | headers}


async def chunks():
    for _ in range(30):
        yield b"aaaaaaaaaa"


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (("POST", "/v1/work", {"json": {"work": "a"}}), 401, "send the API key"),
        (("GET", "/metrics", {}), 401, "send the API key"),
        (post(b'{"work": "wait"}'), 504, "not finished within 0.2 s"),
        (post(b'{"work": "full"}'), 429, "the queue is full"),
        (post(b'{"work": "fail"}'), 500, "its log says why"),
        (post(b'{"work": "too long"}'), 400, "work: String should have at most 5 characters"),
        (post(b'{"work": "a", "more": 1}'), 400, "more: Extra inputs"),
        (post(b'{"work": '), 400, "the body is not JSON"),
        (post(b'{"work": "\\ud800"}'), 400, "valid string"),
        (post(b'{"work": "a"}', **{"content-type": "text/plain"}), 400, "valid dictionary"),
        (post(b"[" * 90), 400, "not JSON"),
        (post(b"a" * 101), 413, "more than 100 bytes"),
        (post(chunks()), 413, "more than 100 bytes"),
        (("GET", "/nowhere", {}), 404, "Not Found"),
        (("GET", "/v1/work", {}), 405, "Method Not Allowed"),
    ],
)
def test_what_is_refused_says_why_in_the_format_of_openai(request_, status, words):
    (answer,), cancelled = answers(request_)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert words in error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert ("Retry-After" in answer.headers) == (status == 429)
    assert cancelled == ["wait"] * (status == 504)


def test_health_needs_no_key_and_metrics_count_every_answer():
    get = {"headers": KEY}
    (health, models, done, _, _, metrics), _ = answers(
        ("GET", "/health", {}),
        ("GET", "/v1/models", get),
        post(b'{"work": "a"}'),
        post(b"{"),
        post(b'{"work": "fail"}'),
        ("GET", "/metrics", get),
    )
    assert health.json() == {"status": "ok", "replicas": 2}
    assert [model["id"] for model in models.json()["data"]] == ["model"]
    assert done.json() == {"done": 1}
    for code in (200, 400, 500):
        assert f'foveate_requests_total{{route="/v1/work",status="{code}"}} 1.0' in metrics.text


def test_the_work_for_a_client_that_leaves_is_cancelled():
    app, cancelled = service()
    told = [{"type": "http.request", "body": b'{"work": "wait"}'}, {"type": "http.disconnect"}]
    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/work", "query_string": b"", "headers": headers}

    async def receive():
        return told.pop(0)

    async def send(_):
        pass

    asyncio.run(app(scope, receive, send))
    assert cancelled == ["wait"]


def test_a_key_is_checked_before_the_body_is_read():
    app, _ = service()
    scope = {"type": "http", "method": "POST", "path": "/v1/work", "query_string": b"", "headers": []}
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_a_body_that_does_not_arrive_is_refused(monkeypatch):
    monkeypatch.setattr(http, "BODY_SECONDS", 0.05)

    app, _ = service()
    sent, begun = [], asyncio.Event()
    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/work", "query_string": b"", "headers": headers}

    async def receive():
        if begun.is_set():
            await asyncio.sleep(20)
        begun.set()
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_model_is_found_by_its_name_and_health_by_head():
    get = {"headers": KEY}
    (health, ready, found, missing), _ = answers(
        ("HEAD", "/health", {}),
        ("HEAD", "/ready", {}),
        ("GET", "/v1/models/model", get),
        ("GET", "/v1/models/a/b", get),
    )
    assert (health.status_code, ready.status_code, health.content) == (200, 200, b"")
    assert (found.json()["id"], missing.status_code) == ("model", 404)


def test_pages_of_named_origins_may_read_answers_and_refusals():
    ours, theirs = ({"headers": {"Origin": origin}} for origin in ("https://ours.org", "https://theirs.org"))
    wanted = {"headers": ours["headers"] | {"Access-Control-Request-Method": "POST"}}
    (asked, refused, other), _ = answers(
        ("OPTIONS", "/v1/work", wanted), ("POST", "/v1/work", ours), ("POST", "/v1/work", theirs),
        origins=["https://ours.org"],
    )  # fmt: skip
    allowed = [answer.headers.get("access-control-allow-origin") for answer in (asked, refused, other)]
    assert allowed == ["https://ours.org", "https://ours.org", None]
    assert (asked.status_code, refused.status_code) == (200, 401)


def test_other_machines_need_a_key(monkeypatch):
    monkeypatch.delenv("FOVEATE_API_KEY", raising=False)
    assert api_key("127.0.0.1") == ""
    with pytest.raises(ValueError, match="set FOVEATE_API_KEY"):
        api_key("0.0.0.0")
    monkeypatch.setenv("FOVEATE_API_KEY", "secret")
    assert api_key("0.0.0.0") == "secret"


def test_a_port_that_is_taken_is_refused():
    import socket

    with socket.create_server(("127.0.0.1", free_port("127.0.0.1", 0))) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {taken}"):
            free_port("127.0.0.1", taken)
