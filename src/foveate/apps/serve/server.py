"""The HTTP server of both services: uvicorn, with a bound on connections and on the time for a request's header."""

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Server"]

MOST_CONNECTIONS = 1000
"""Largest number of connections; further ones are closed at once."""
HEADER_SECONDS = 10.0
"""Time in which the header of a request must arrive."""


class Server(uvicorn.Server):
    """An HTTP server. Its method `run` serves requests until Ctrl-C or SIGTERM.

    Args:
        app: ASGI application.
        host: Address to listen on.
        port: Port to listen on.
        on_ready: Called when it listens.
    """

    def __init__(self, app: Any, host: str, port: int, on_ready: Callable[[], object] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=_Connection,
                ws="none",
                log_level="warning",
                timeout_graceful_shutdown=5,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: Any = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()


class _Connection(H11Protocol):
    """A connection that is closed if the header of its next request does not arrive in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._expect_header()

    def on_response_complete(self) -> None:
        self._expect_header()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late:
            self._late.cancel()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        if self._late:
            self._late.cancel()
        self._late = self.loop.call_later(HEADER_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        if not self.cycle or self.cycle.response_complete:
            self.transport.close()
