"""Laws of the queue of questions: what one question costs another, and how stuck work is noticed."""

import asyncio
import threading
from contextlib import aclosing

import pytest
from fastapi import HTTPException

from foveate.apps.serve import question_queue
from foveate.apps.serve.completion import Completion, Outcome
from foveate.apps.serve.question_queue import QuestionQueue

DONE = Outcome([], "done", "stop", 1, 0, 1)


def completion(text):
    return Completion.model_validate({"messages": [{"role": "user", "content": text}]})


def answer(take):
    while question := take(lambda question: True):
        question.finish(DONE)


async def last(queue, text):
    async with aclosing(queue.pieces(completion(text))) as pieces:
        return [piece async for piece in pieces][-1]


def test_long_preparations_delay_no_other_question_and_stop_when_nobody_waits():
    stopped = threading.Semaphore(0)

    def prepare(question):
        try:
            while question.asked.messages[0].content == "long":
                question.heartbeat()
        finally:
            stopped.release()

    async def run():
        queue = QuestionQueue(prepare, answer, batch=1, queue=4)
        long = [asyncio.ensure_future(last(queue, "long")) for _ in range(2)]
        assert await asyncio.wait_for(last(queue, "short"), 20) is DONE
        queue.check_ready()  # preparation makes steps
        for each in long:
            each.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        assert queue.busy == 0

    asyncio.run(run())
    assert all(stopped.acquire(timeout=20) for _ in range(3))


@pytest.mark.parametrize("where", ["prepare", "answer"])
def test_work_without_steps_is_noticed_also_when_its_client_has_left(where, monkeypatch):
    monkeypatch.setattr(question_queue, "STALLED", 0.05)
    free = threading.Event()

    def stuck(take):
        take(lambda question: True)
        free.wait(20)

    async def run():
        wait = (lambda question: free.wait(20)) if where == "prepare" else (lambda question: None)
        queue = QuestionQueue(wait, stuck, batch=1, queue=4)
        queue.check_ready()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last(queue, "a"), 0.2)
        assert queue.busy == 0
        queue.check(20)
        for check in (queue.check_ready, lambda: queue.check(0.05)):
            with pytest.raises(HTTPException, match="no step") as error:
                check()
            assert error.value.status_code == 503
        free.set()

    asyncio.run(run())


def test_a_full_queue_is_not_ready():
    free = threading.Event()

    async def run():
        queue = QuestionQueue(lambda question: free.wait(20), answer, batch=1, queue=0)
        waiting = [asyncio.ensure_future(last(queue, "a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="full"):
            queue.check_ready()
        free.set()
        assert await asyncio.gather(*waiting) == [DONE, DONE]
        queue.check_ready()

    asyncio.run(run())
