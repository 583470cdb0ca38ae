"""Laws of tuning: what it promises holds when drawn again, and what it cannot promise it says."""

import json
import math
from dataclasses import replace

import pytest

import foveate
from foveate import Budget, HilbertA, ToMA
from foveate.demo.untrained import untrained_pipeline
from foveate.diffusers import measure
from foveate.diffusers.adapter import ModelAdapter
from foveate.diffusers.pipelines import Request, draw
from foveate.diffusers.preset import PRESETS, Preset, describe
from foveate.diffusers.tune import _dense_layers, _weights, settings
from foveate.methods import ComposedMethod
from foveate.methods.base import layer_ranges
from foveate.utils.similarity import psnr, ssim

PROMPTS = ["a cat", "an owl", "a car"]
METHODS = [ToMA(keep=0.5, tile=(4, 4), skip=0), HilbertA(tiles=4)]
SETTINGS = {"size": (64, 64), "steps": 4, "methods": METHODS}
TIMES = {ToMA: 0.6, HilbertA: 0.8}


@pytest.fixture(scope="module")
def pipe():
    return untrained_pipeline(layers=1, single_layers=3, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


@pytest.fixture(autouse=True)
def clock(pipe, monkeypatch):
    """Every measurement takes a second with dense, and with a method what `TIMES` says."""
    time = 0.0

    def now(_device):
        nonlocal time
        adapter = ModelAdapter.of(pipe.transformer)
        time += math.prod(TIMES[type(method)] for method in adapter.methods) if adapter else 1.0
        return time

    monkeypatch.setattr(measure, "now", now)


def drawn(pipe, number, preset=None):
    request = Request(PROMPTS[number], (64, 64), 4, None, number)
    if preset is None:
        return draw(pipe, request)[0]
    with foveate.apply(pipe, preset):
        return draw(pipe, request)[0]
