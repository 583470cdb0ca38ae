"""Laws of a replica that generates, without Ray."""

import io
from functools import cache
from time import monotonic

import numpy as np
import pytest
from PIL import Image

from foveate import ToMA
from foveate.apps.demo import LORAS
from foveate.apps.serve.image_replicas import ImageReplica, ServedPipeline
from foveate.pipelines.lora import LORA_FILE, load_lora, read_lora, using
from foveate.pipelines.request import Request, draw, load_pipeline
from foveate_models import find

SIZE = 32, 32


@cache
def pipeline(lora):
    pipe = load_pipeline(str(find("pipeline")), "cpu", "float32")
    if lora:
        load_lora(pipe, lora)
    return pipe


def reference(method, lora, prompt, size, steps, seed):
    with using(pipeline(lora), method):
        return np.asarray(draw(pipeline(lora), Request(prompt, size, steps, None, seed))[0]).astype(int)


@pytest.mark.parametrize("method", [ToMA(keep=0.5), pytest.param("lora", marks=pytest.mark.slow)])
def test_requests_that_come_together_get_the_pictures_of_generate(method):
    lora = find(LORAS["built-in"]) / LORA_FILE if method == "lora" else None
    method = read_lora(lora) if lora else method
    size, other = ((48, 48), (64, 48)) if lora else (SIZE, (48, 32))
    asked = [("an owl", size, 2, 0), ("a red apple", size, 2, 1), ("an owl", other, 2, 0), ("an owl", size, 3, 0)]

    served = ServedPipeline(str(find("pipeline")), method, {"method": "m"}, lora=lora, device="cpu", dtype="float32")
    served.draw_together(jobs := [served.job(*each) for each in asked])
    for (prompt, size, steps, seed), job in zip(asked, jobs, strict=True):
        picture = Image.open(io.BytesIO(job.result))
        expected = reference(method, lora, prompt, size, steps, seed)
        assert np.abs(np.asarray(picture).astype(int) - expected).max() <= 2  # a batch rounds differently
        assert picture.text["seed"] == str(seed)
        assert picture.text["method"] == "m"
    if lora:
        served.draw_together([small := served.job("an owl", SIZE, 2, 0)])
        assert "tiles need 32 tokens" in small.result


def test_what_cannot_be_drawn_is_said_and_what_nobody_waits_for_is_not_drawn(monkeypatch):
    served = ServedPipeline(str(find("pipeline")), None, {}, size=SIZE, device="cpu", dtype="float32")
    assert "multiples of 4" in served.job("an owl", (33, 32), 2, 0).result
    long, left = served.job("owl " * 1000, None, 2, 0), served.job("an owl", None, 1000, 0)
    steps, step = [], served._pipe.scheduler.step

    def leave(*args, **kwargs):
        steps.append(args)
        left.abandoned = long.abandoned = len(steps) == 3
        return step(*args, **kwargs)

    monkeypatch.setattr(served._pipe.scheduler, "step", leave)
    served.draw_together([long, left])
    assert "does not read the end" in long.result
    assert left.result == ""
    assert len(steps) == 3
    served.draw_together([job := served.job("an owl", None, 2, 0)])
    picture = np.asarray(Image.open(io.BytesIO(job.result))).astype(int)
    assert np.abs(picture - reference(None, None, "an owl", SIZE, 2, 0)).max() <= 2


def test_a_model_of_videos_is_refused():
    with pytest.raises(ValueError, match="makes videos, and only images are served"):
        ServedPipeline(str(find("video")), None, {}, device="cpu", dtype="float32")


def test_a_replica_without_a_denoising_step_for_too_long_is_unhealthy_so_that_ray_replaces_it():
    replica = ImageReplica.__new__(ImageReplica)
    for replica._timeout, replica.last_step in ((0.1, None), (20.0, monotonic())):
        replica.check_health()
    replica._timeout, replica.last_step = 0.1, monotonic() - 1
    with pytest.raises(RuntimeError, match="no denoising step"):
        replica.check_health()
