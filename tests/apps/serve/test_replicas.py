"""Laws of chat completions from two replicas on Ray."""

import asyncio
import re
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Thread

import httpx
import pytest
from fastapi import HTTPException
from ray import cloudpickle
from services import replicas, started

from foveate.apps.cli.common import free_port
from foveate.apps.demo.examples import write_examples
from foveate.apps.serve.answerer import Answerer
from foveate.apps.serve.chat import chat_app
from foveate.apps.serve.chat_replicas import ChatFront, ChatReplica
from foveate.apps.serve.completion import Completion
from foveate.apps.serve.replicas import running
from foveate.apps.serve.server import Server

pytestmark = pytest.mark.slow
URL = "/v1/chat/completions"


def body(text, **options):
    return {"messages": [{"role": "user", "content": text}]} | options


def test_replicas_answer_like_one_process_also_when_one_is_killed(tmp_path):
    questions, _ = write_examples(tmp_path, 0)
    asked, done, statuses = [*questions][:40], count(1), Counter()

    def ask(text):
        while (answer := client.post(URL, json=body(text))).status_code == 429:
            statuses[429] += 1
            time.sleep(float(answer.headers["Retry-After"]) / 4)
        statuses[answer.status_code] += 1
        if next(done) == 15:
            replicas(process)[0].send_signal(signal.SIGKILL)
        return answer.json()["choices"][0]["message"]["content"]

    with (
        started("rag serve facts --replicas 2 --batch 2 --queue 4", tmp_path) as (address, process, log),
        httpx.Client(base_url=address, timeout=100) as client,
    ):
        assert client.get("/health").json() == {"status": "ok", "replicas": 2, "indexes": ["facts"]}
        with ThreadPoolExecutor(12) as clients:
            answers = dict(zip(asked, clients.map(ask, asked), strict=True))
        assert sum(answers[text] == questions[text] for text in asked) >= 0.9 * len(asked)
        assert statuses[200] == len(asked)
        assert statuses.keys() <= {200, 429}
        for text in asked[:3]:
            with client.stream("POST", URL, json=body(text, stream=True)) as stream:
                assert "".join(re.findall(r'"content": "([^"]*)"', "".join(stream.iter_lines()))) == answers[text]
        refused = client.post(URL, json=body("a", index="nothing"))
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith("there are these: facts")
        assert f'foveate_requests_total{{route="{URL}",status="400"}} 1.0' in client.get("/metrics").text
        while client.get("/health").json()["replicas"] != 2:
            time.sleep(0.2)
        assert "foveate/apps/serve/" not in log.read_text()  # Ray reports the killed replica itself


class Waiting(Answerer):
    """A reader whose answers take until nobody waits for them. It writes "begun" and "stopped" into a file."""

    def __init__(self, file):
        self.indexes, self.batch, self.file = {}, 1, file

    def prepare(self, question):
        pass

    def answer(self, take):
        waits = take(lambda question: True)
        self.write("begun")
        while not waits.outcome.cancelled():
            waits.emit("on ")
            time.sleep(0.01)
        self.write("stopped")

    def write(self, word):
        with self.file.open("a") as file:
            file.write(f"{word}\n")


def test_a_replica_whose_work_makes_no_step_is_unhealthy_so_that_ray_replaces_it(tmp_path):
    file = tmp_path / "file"

    async def run():
        replica = ChatReplica(lambda: Waiting(file), timeout=0.2)
        replica.check_health()
        pieces = replica.pieces(Completion.model_validate(body("a")))
        await anext(pieces)
        await asyncio.sleep(0.4)
        with pytest.raises(HTTPException, match="no step"):
            replica.check_health()
        await pieces.aclose()

    asyncio.run(run())


@contextmanager
def serving(replica):
    """A client of a front."""
    front, port = ChatFront(replica, "chat", []), free_port("127.0.0.1", 0)
    app = chat_app(front.pieces, front.health, front.health, "reader", key="", timeout=3.0)
    server = Server(app, "127.0.0.1", port)
    thread = Thread(target=server.run)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def test_work_stops_when_its_client_leaves_or_its_time_is_over_and_a_full_queue_refuses(tmp_path):
    file = tmp_path / "file"
    file.touch()
    said = lambda word: file.read_text().split().count(word)  # noqa: E731

    def wait_for(word, times):
        end = time.monotonic() + 30
        while said(word) < times:
            assert time.monotonic() < end, file.read_text()
            time.sleep(0.02)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas cannot import a test
    options = {"chat": {"open_answerer": lambda: Waiting(file), "timeout": 60.0}}
    service = running(ChatReplica, options, batch=1, queue=1)
    with service as handles, serving(handles["chat"]) as client, ThreadPoolExecutor(4) as clients:
        post = lambda: client.post(URL, json=body("a"), timeout=60).status_code  # noqa: E731
        statuses = Counter(each.result() for each in [clients.submit(post) for _ in range(4)])
        assert statuses.keys() == {504, 429}
        assert statuses[504] <= 3  # two that the replica has, and one that waits
        wait_for("stopped", said("begun"))
        before = said("begun")
        with pytest.raises(httpx.ReadTimeout):
            client.post(URL, json=body("a"), timeout=0.5)
        wait_for("stopped", before + 1)
        with client.stream("POST", URL, json=body("a", stream=True)) as stream:
            assert "on " in "".join(line for line, _ in zip(stream.iter_lines(), range(5), strict=False))
        wait_for("stopped", before + 2)
