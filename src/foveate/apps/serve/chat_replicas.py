# pyright: basic
"""Answers about documents from several replicas, each with its own model."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from foveate.apps.serve.answerer import Answerer
from foveate.apps.serve.completion import Completion, Outcome
from foveate.apps.serve.http import overloaded
from foveate.apps.serve.question_queue import QuestionQueue
from foveate.apps.serve.replicas import RETRIES, count_replicas

__all__ = ["ChatFront", "ChatReplica"]


class ChatReplica:
    """Replica that holds the model and answers requests in batches.

    Args:
        open_answerer: Loads the model and opens the indexes.
        timeout: Seconds without a step of work after which Ray replaces the replica.
    """

    def __init__(self, open_answerer: Callable[[], Answerer], timeout: float) -> None:
        answerer, self._timeout = open_answerer(), timeout
        # requests wait at Ray's handle
        self._queue = QuestionQueue(answerer.prepare, answerer.answer, answerer.batch, queue=0)

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica after an error."""
        self._queue.check(self._timeout)

    async def pieces(self, asked: Completion) -> AsyncGenerator[str | Outcome | ValueError]:
        """Yield the answer piece by piece, then its outcome; or the error of a bad request."""
        try:
            async with aclosing(self._queue.pieces(asked)) as found:
                async for piece in found:
                    yield piece
        except ValueError as error:  # raised here, it would be in the log
            yield error


class ChatFront:
    """Passes requests to replicas.

    Args:
        replica: Ray's handle of the replicas.
        name: Name of the replicas.
        indexes: Names of the indexes.
    """

    def __init__(self, replica: Any, name: str, indexes: Sequence[str]) -> None:
        self._replica, self._name, self._indexes = replica.options(stream=True), name, [*indexes]

    async def health(self) -> dict[str, Any]:
        """Fields of /health."""
        return {"replicas": (await count_replicas([self._name]))[self._name], "indexes": self._indexes}

    async def pieces(self, asked: Completion) -> AsyncGenerator[str | Outcome]:
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
