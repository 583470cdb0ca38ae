# pyright: basic
"""The queue of a chat service: questions are prepared, wait, and join the answers that are being generated."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock, get_ident
from time import monotonic
from typing import Any

from fastapi import HTTPException

from foveate.apps.serve.completion import Completion, Outcome
from foveate.apps.serve.http import overloaded

__all__ = ["PendingQuestion", "QuestionQueue", "Take"]

THREADS = 2
"""Number of threads that generate answers: a second batch can begin while the first one runs."""
PREPARING_THREADS = 4
"""Number of threads that tokenize and choose passages."""
STALLED = 10.0
"""Seconds without a step of some thread after which the service asks for no further requests."""


class PendingQuestion:
    """A request that is being answered.

    Args:
        asked: The request.
        emit: Called with each new piece of the answer, for streaming.
        beat: Called at each step of preparation.

    Attributes:
        outcome: Future of the answer or the error. Cancel it to stop the work for it.
        prepared: What preparation has found, for the thread that answers.
    """

    def __init__(
        self,
        asked: Completion,
        emit: Callable[[str], object] = lambda text: None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self.asked, self.emit, self._beat = asked, emit, beat
        self.outcome: Future[Outcome] = Future()
        self.prepared: Any = None

    def heartbeat(self) -> None:
        """Record that the work for this question goes on.

        Raises:
            CancelledError: If nobody waits for the answer any more.
        """
        self._beat()
        if self.outcome.cancelled():
            raise CancelledError

    def finish(self, found: Outcome | Exception) -> None:
        """Set the outcome, unless the question was cancelled."""
        with suppress(InvalidStateError):
            if isinstance(found, Outcome):
                self.outcome.set_result(found)
            else:
                self.outcome.set_exception(found)


Take = Callable[[Callable[[PendingQuestion], bool]], PendingQuestion | None]
"""Takes the question that has waited longest if it passes a test, and marks a step of the thread."""


class QuestionQueue:
    """A bounded queue of questions. Some threads prepare them, and others answer them.

    Args:
        prepare: Does the part of the work for a question that needs no model; raises what is wrong with it.
        answer: Answers questions until none waits; sets the outcome of each.
        batch: Largest number of questions that a thread answers together.
        queue: Largest number of waiting questions.

    Attributes:
        busy: Number of questions for which a client waits.
    """

    def __init__(
        self, prepare: Callable[[PendingQuestion], object], answer: Callable[[Take], object], batch: int, queue: int
    ) -> None:
        self._prepare, self._answer, self._most, self.busy = prepare, answer, THREADS * batch + queue, 0
        self._preparing, self._answering = ThreadPoolExecutor(PREPARING_THREADS), ThreadPoolExecutor(THREADS)
        self._waiting, self._lock = deque[PendingQuestion](), Lock()
        self._beats: dict[int, float] = {}  # time of the last step of each thread at work

    async def pieces(self, asked: Completion) -> AsyncGenerator[str | Outcome]:
        """Yield the answer piece by piece, then its outcome. Closing the generator cancels the answer."""
        if self.busy >= self._most:
            raise overloaded()
        loop, found = asyncio.get_running_loop(), asyncio.Queue[Any]()
        question = PendingQuestion(asked, lambda text: loop.call_soon_threadsafe(found.put_nowait, text), self._beat)
        question.outcome.add_done_callback(lambda _: loop.call_soon_threadsafe(found.put_nowait, None))
        self.busy += 1
        self._preparing.submit(self._put, question)
        try:
            while (piece := await found.get()) is not None:
                yield piece
            yield question.outcome.result()
        finally:
            question.outcome.cancel()
            self.busy -= 1

    def check(self, seconds: float) -> None:
        """Check that every thread at work has made a step in the last seconds.

        Raises:
            HTTPException: If not.
        """
        now = monotonic()
        if (stalled := max((now - beat for beat in [*self._beats.values()]), default=0.0)) > seconds:
            raise HTTPException(503, f"some work has made no step for {stalled:.0f} s")

    def check_ready(self) -> None:
        """Check that a question would be accepted, and answered soon.

        Raises:
            HTTPException: If not.
        """
        self.check(STALLED)
        if self.busy >= self._most:
            raise HTTPException(503, "the queue is full")

    def _put(self, question: PendingQuestion) -> None:
        with self._at_work():
            try:
                question.heartbeat()
                self._prepare(question)
            except Exception as error:
                question.finish(error)
                return
        with self._lock:
            self._waiting.append(question)
        self._answering.submit(self._work)

    def _work(self) -> None:
        with self._at_work():
            self._answer(self._take)

    def _take(self, fits: Callable[[PendingQuestion], bool]) -> PendingQuestion | None:
        self._beat()
        with self._lock:
            while self._waiting and self._waiting[0].outcome.cancelled():
                self._waiting.popleft()
            return self._waiting.popleft() if self._waiting and fits(self._waiting[0]) else None

    def _beat(self) -> None:
        self._beats[get_ident()] = monotonic()

    @contextmanager
    def _at_work(self) -> Generator[None]:
        self._beat()
        try:
            yield
        finally:
            del self._beats[get_ident()]
