"""Laws of the image service, started as a user would: two replicas on Ray, asked over HTTP."""

import base64
import io
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import fuzzing
import httpx
import hypothesis.strategies as st
import numpy as np
import openai
import pytest
from PIL import Image
from services import replicas, started

from foveate.pipelines.request import Request, draw, load_pipeline
from foveate_models import find

pytestmark = pytest.mark.slow
URL = "/v1/images/generations"
PROMPTS = "a red apple", "an owl", "a blue car above a green frog"
CASES = [(prompt, seed) for prompt in PROMPTS for seed in range(5)]
ENOUGH = 20
"""Images after which a replica has allocated what it needs."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Address, process and log of `foveate serve`. At most 2 x 2 x 2 + 4 images are accepted at a time."""
    options = "--replicas 2 --batch 2 --queue 4 --steps 1 --max-steps 5000 --max-side 128 --timeout 100"
    with started(f"serve {options}", tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def client(service):
    with httpx.Client(base_url=service[0], timeout=200) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The image of each case, as `foveate generate` generates it."""
    pipe = load_pipeline(str(find("pipeline")), "cpu", "float32")
    return {case: pixels(draw(pipe, Request(case[0], (64, 64), 1, None, case[1]))[0]) for case in CASES}


def pixels(picture):
    return np.asarray(picture).astype(int)


def decoded(answer):
    return pixels(Image.open(io.BytesIO(base64.b64decode(answer))))


def wait_for_replicas(client):
    while client.get("/health").json().get("replicas") != {"dense": 2}:
        time.sleep(0.2)


def draw_all(client, expected, cases, on_answer=lambda done: None):
    """Ask for cases by 16 clients until each has its image, which is checked. The statuses."""
    done, statuses = count(1), Counter()

    def ask(case):
        while True:
            answer = client.post(URL, json={"prompt": case[0], "seed": case[1], "size": "64x64"})
            statuses[answer.status_code] += 1
            if answer.status_code != 429:
                break
            time.sleep(float(answer.headers["Retry-After"]) * random.random())
        picture = decoded(answer.json()["data"][0]["b64_json"])
        assert np.abs(picture - expected[case]).max() <= 2  # batches round differently
        on_answer(next(done))

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(ask, cases))
    return statuses


def test_no_request_is_lost_when_a_replica_is_killed_twice(service, client, expected):
    killed = []

    def kill(done):
        if done in (10, 35):
            process = next(process for process in replicas(service[1]) if process.pid not in killed)
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    wait_for_replicas(client)
    statuses = draw_all(client, expected, (CASES * 4)[:60], kill)
    assert len(killed) == 2
    assert statuses[200] == 60
    assert statuses.keys() == {200, 429}
    wait_for_replicas(client)
    retries = [line for line in client.get("/metrics").text.splitlines() if line.startswith("foveate_retries_total")]
    assert float(retries[0].split()[1]) >= 1


def test_memory_of_the_replicas_is_flat(service, client, expected):
    wait_for_replicas(client)
    draw_all(client, expected, (CASES * 4)[: 2 * ENOUGH])
    before = {process.pid: process.memory_info().rss for process in replicas(service[1])}
    draw_all(client, expected, (CASES * 4)[: 2 * ENOUGH])
    after = {process.pid: process.memory_info().rss for process in replicas(service[1])}
    assert after.keys() == before.keys()
    assert all(after[pid] < 1.03 * before[pid] for pid in after)


def test_fuzzed_requests_get_a_picture_or_one_clear_refusal(service, client):
    statuses, start = Counter(), service[2].stat().st_size
    optional = {
        "n": st.integers(1, 2),
        "seed": st.integers(0, 2**63 - 1),
        "method": st.just("dense"),
        "size": st.sampled_from(["64x64", "64x128", "65x64"]),
        "response_format": st.sampled_from(["b64_json", "url"]),
    }
    valid = st.fixed_dictionaries({"prompt": st.sampled_from(PROMPTS) | st.text(max_size=9)}, optional=optional)
    fields = ["prompt", "model", "quality", "stream", "user", *optional]

    def post(content):
        return client.post(URL, content=content, headers={"content-type": "application/json"}, timeout=40)

    with ThreadPoolExecutor(4) as clients:
        for answer in clients.map(post, fuzzing.bodies(100, valid, fields)):
            statuses[answer.status_code] += 1
            fuzzing.check(answer, 429)
    assert min(statuses[200], statuses[400]) > 10
    assert "Traceback" not in service[2].read_text()[start:]


def test_pictures_that_nobody_waits_for_are_not_drawn_to_the_end(client):
    wait_for_replicas(client)
    long = {"prompt": "an owl", "size": "128x128", "steps": 5000, "n": 4}
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            client.post(URL, json=long, timeout=1.5)
    assert client.post(URL, json={"prompt": "an owl", "size": "64x64"}).status_code == 200


def test_the_client_of_openai_gets_pictures_and_urls(service, client, expected):
    prompt, seed = CASES[0]
    with openai.OpenAI(base_url=f"{service[0]}/v1", api_key="none", max_retries=0) as ours:
        assert [model.id for model in ours.models.list()] == ["built-in"]
        answer = ours.images.generate(prompt=prompt, n=2, size="64x64", extra_body={"seed": seed})
        assert [each.seed for each in answer.data] == [seed, seed + 1]
        for each in answer.data:
            assert np.abs(decoded(each.b64_json) - expected[prompt, each.seed]).max() <= 2
        by_url = ours.images.generate(prompt=prompt, size="64x64", response_format="url", extra_body={"seed": seed})
        picture = pixels(Image.open(io.BytesIO(client.get(by_url.data[0].url).content)))
        assert np.abs(picture - expected[CASES[0]]).max() <= 2
        with pytest.raises(openai.BadRequestError, match="multiples of 4"):
            ours.images.generate(prompt=prompt, size="65x64")
    assert client.get("/docs").status_code == 200
