"""Laws of the training: it resumes exactly, and survives damaged files."""

import contextlib
import csv
import itertools
import math

import pytest
import torch
from lab.training import flow
from lab.training.flow import FlowTraining
from lab.training.painter import Latents, Painter, flow_loss, noise_levels
from lab.training.stages import Batches, Stage
from PIL import Image
from torch import nn

from foveate.demo.scenes import scenes
from foveate.demo.untrained import untrained_pipeline

TINY = {"layers": 1, "single_layers": 1, "heads": 2, "rope": (4, 4, 8), "text_dim": 32, "text_layers": 1}
RECIPE = (
    Stage(name="first", images=24, batches={16: 4}, rates=(1e-3, 5e-4)),
    Stage(name="second", images=15, batches={16: 4, 32: 2}, rates=(5e-4, 0.0)),
)


def training(out, **options):
    return FlowTraining(out, untrained_pipeline(**TINY), recipe=RECIPE, seed=1, **options)


@pytest.fixture
def every_loss_logged(monkeypatch):
    monkeypatch.setattr(flow, "LOG_EVERY", 1)
    monkeypatch.setattr(flow, "sample_grid", lambda *_: Image.new("RGB", (2, 2)))


def losses(out):
    return [row[:3] for row in csv.reader((out / "log.csv").read_text().splitlines())]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, every_loss_logged, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = training(whole)
    assert undisturbed.run(workers=0)
    calls = itertools.count(1)

    def lights_out(*arguments):
        if next(calls) % 5 == 0:  # dies without warning; checkpoints come every 2 steps
            raise SystemError
        return flow_loss(*arguments)

    monkeypatch.setattr(flow, "flow_loss", lights_out)
    monkeypatch.setattr(flow, "CLOCK_EVERY", 2)
    attempts, done = 0, False
    while not done:
        attempts += 1
        resumed = training(broken)
        with contextlib.suppress(SystemError):
            done = resumed.run(workers=0, checkpoint_minutes=0)
    assert attempts > 2
    for ours, theirs in zip(undisturbed.average.parameters(), resumed.average.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    again = {tuple(row[:2]): row[2] for row in losses(broken)}
    assert {tuple(row[:2]) for row in losses(whole)} == set(again)
    assert all(
        float(loss) == pytest.approx(float(again[stage, step]), abs=2e-5) for stage, step, loss in losses(whole)
    )


def test_a_run_stops_at_the_time_limit_and_returns_false(tmp_path, every_loss_logged, monkeypatch):
    long = (Stage(name="long", images=4000, batches={16: 4}, rates=(1e-3, 1e-3)),)
    run = FlowTraining(tmp_path, untrained_pipeline(**TINY), recipe=long)
    assert not run.run(workers=0, minutes=0)
    again = FlowTraining(tmp_path, untrained_pipeline(**TINY), recipe=long)
    assert (again.stage, again.step) == (0, 10)
    assert list(tmp_path.glob("*.png"))
    assert not again.run(workers=0, minutes=0, sample_every=0)
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_the_loss_falls(tmp_path, every_loss_logged):
    stage = Stage(name="one", images=800, batches={16: 8}, rates=(1e-2, 1e-3))
    FlowTraining(tmp_path, untrained_pipeline(**TINY), recipe=(stage,)).run(workers=0)
    loss = [float(row[2]) for row in losses(tmp_path)]
    assert sum(loss[-10:]) < 0.8 * sum(loss[:10])


def test_devices_draw_different_scenes_of_the_same_size():
    stage = Stage(name="one", images=100, batches={16: 3, 32: 2}, rates=(1e-3, 1e-3))
    first, second = (Batches(stage, untrained_pipeline(**TINY), 0, device, 2) for device in range(2))
    assert len(first) == math.ceil(100 / 5)
    for step in range(len(first)):
        ours, theirs = first[step], second[step]
        assert ours.side == theirs.side
        assert ours.t5_ids.shape == theirs.t5_ids.shape
        assert not torch.equal(ours.scenes.objects, theirs.scenes.objects)
        assert torch.equal(ours.t5_ids, first[step].t5_ids)
    assert {first[step].side for step in range(len(first))} == {16, 32}


def test_no_batch_holds_a_scene_kept_for_evaluation():
    stage = Stage(name="one", images=4000, batches={16: 100}, rates=(1e-3, 1e-3))
    pipeline = untrained_pipeline(**TINY)
    batches = Batches(stage, pipeline, 0, 0, 1)
    trained = {text for step in range(40) for text in pipeline.tokenizer_2.batch_decode(batches[step].t5_ids, True)}
    kept = [scene.caption for _, scene in zip(range(2000), scenes(0, evaluation=True), strict=False)]
    assert len(trained) > 3000
    assert not trained & {pipeline.tokenizer_2.decode(pipeline.tokenizer_2(text).input_ids, True) for text in kept}


def test_the_loss_of_the_true_velocity_is_zero_and_noise_levels_follow_the_size():
    pipeline = untrained_pipeline(**TINY)
    batch = Batches(Stage(name="one", images=4, batches={16: 4}, rates=(0.0, 0.0)), pipeline, 0, 0, 1)[0]
    latents = Latents(pipeline, torch.device("cpu"))
    clean = latents(batch)

    class Oracle(nn.Module):
        def forward(self, noisy, sigma, *_):
            return (noisy - clean) / sigma[:, None, None]

    assert flow_loss(Oracle(), latents, batch, torch.Generator().manual_seed(0)) < 1e-6
    shifts = [latents.shift(torch.empty(1, tokens, 0)) for tokens in (1024, 4096, 16384)]
    levels = [noise_levels(4000, shift, torch.Generator().manual_seed(0)) for shift in shifts]
    medians = [level.median().item() for level in levels]
    assert medians == pytest.approx([torch.tensor(mu).sigmoid().item() for mu in (0.5, 0.8, 2.0)], abs=0.02)


def test_a_fresh_painter_starts_from_velocity_zero(tmp_path):
    painter = Painter(untrained_pipeline(**TINY))
    painter.initialise()
    ids = torch.randint(3, 50, (2, 64))
    velocity = painter(torch.randn(2, 16, 16), torch.rand(2), ids, ids)
    assert velocity.shape == (2, 16, 16)
    assert (velocity == 0).all()
