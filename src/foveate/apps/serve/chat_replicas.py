# pyright: basic
"""Answers about documents from several replicas, each with its own model."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from foveate.apps.serve.answerer import Answerer, Completion, Outcome
from foveate.apps.serve.chat import QuestionQueue, chat_app
from foveate.apps.serve.http import overloaded
from foveate.apps.serve.replicas import RETRIES, count_replicas

__all__ = ["ChatFront", "ChatReplica"]


class ChatReplica:
    """Replica that holds the model and answers requests in batches.

    Args:
        open_answerer: Loads the model and opens the indexes.
        batch: Largest number of requests answered together.
    """

    def __init__(self, open_answerer: Callable[[], Answerer], batch: int) -> None:
        self._queue = QuestionQueue(open_answerer().answer, batch, queue=0)  # requests wait at Ray's handle

    async def pieces(self, asked: Completion) -> AsyncGenerator[str | Outcome | ValueError]:
        """Yield the answer piece by piece, then its outcome; or the error of a bad request."""
        try:
            async with aclosing(self._queue.pieces(asked)) as found:
                async for piece in found:
                    yield piece
        except ValueError as error:  # raised here, it would be in the log
            yield error


@serve.ingress()
class ChatFront:
    """HTTP front: checks requests and passes them to replicas."""

    def __init__(self, model: str, key: str, timeout: float, indexes: dict[str, int], replicas: Mapping[str, Any]):
        self._model, self._key, self._timeout, self._indexes = model, key, timeout, indexes
        self._replicas, (replica,) = replicas, replicas.values()
        self._replica = replica.options(stream=True)

    def __serve_build_asgi_app__(self) -> Any:
        return chat_app(self._pieces, self._health, self._model, key=self._key, timeout=self._timeout)

    async def _health(self) -> dict[str, Any]:
        return {"replicas": sum((await count_replicas(self._replicas)).values()), "indexes": self._indexes}

    async def _pieces(self, asked: Completion) -> AsyncGenerator[str | Outcome]:
        """Yield the answer piece by piece. If a replica dies before the first piece, another one starts over."""
        for _ in range(RETRIES + 1):
            answer, begun = self._replica.pieces.remote(asked), False
            try:
                async for piece in answer:
                    if isinstance(piece, ValueError):
                        raise piece
                    begun = True
                    yield piece
                return
            except (asyncio.CancelledError, GeneratorExit):
                answer.cancel()
                raise
            except BackPressureError:
                raise overloaded() from None
            except RayActorError:
                if begun and asked.stream:
                    break
                await asyncio.sleep(0.1)  # until Ray knows that it died
        raise HTTPException(503, "the replica that answered died")
