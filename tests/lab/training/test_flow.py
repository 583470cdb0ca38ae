"""Laws of the training: it resumes exactly, and survives damaged files."""

import contextlib
import csv
import itertools

import pytest
import torch
from lab.training import flow
from lab.training.flow import FlowTraining
from lab.training.stages import ImageBatches, Stage
from lab.training.velocity import Latents, VelocityModel, flow_loss, noise_levels
from torch import nn

from foveate.apps.demo.scenes import scenes
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.training.run import RunOptions

TINY = {"layers": 1, "single_layers": 1, "heads": 2, "rope": (4, 4, 8), "text_dim": 32, "text_layers": 1}
RECIPE = (
    Stage(name="first", images=12, batches={16: 4}, rates=(1e-3, 5e-4)),
    Stage(name="second", images=9, batches={16: 4, 32: 2}, rates=(5e-4, 0.0)),
)


@pytest.fixture(autouse=True)
def one_picture_a_sheet(monkeypatch):
    monkeypatch.setattr(flow, "SHOWN", 1)


def training(out, recipe=RECIPE, **options):
    return FlowTraining(out / "flow", untrained_pipeline(**TINY), recipe, RunOptions(at_once=1, **options), seed=1)


def losses(out):
    return [float(row[1]) for row in csv.reader((out / "flow" / "log.csv").read_text().splitlines())]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = training(whole)
    assert undisturbed.train()
    calls = itertools.count(1)

    def lights_out(*arguments):
        if next(calls) % 3 == 0:  # dies without warning
            raise SystemError
        return flow_loss(*arguments)

    monkeypatch.setattr(flow, "flow_loss", lights_out)
    monkeypatch.setattr(FlowTraining, "export", lambda run: None)  # after every step
    attempts, done = 0, False
    while not done:
        attempts += 1
        resumed = training(broken, checkpoint_minutes=0)
        with contextlib.suppress(SystemError):
            done = resumed.train()
    assert attempts > 2
    averages = (run.trained.average.shadow_params for run in (undisturbed, resumed))
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-6)
    assert losses(whole) == pytest.approx(losses(broken), abs=2e-5)
    assert len(losses(whole)) == sum(stage.steps(1) for stage in RECIPE)


def test_the_rate_follows_the_stages(tmp_path):
    run, rates = training(tmp_path), []
    for stage in RECIPE:
        steps = stage.steps(1)
        rates += [(run.step + step, stage.rate(step, steps)) for step in range(steps)]
        run.step += steps
    for run.step, rate in rates:
        assert run.rate(0.0) == rate


def test_a_run_stops_at_the_time_limit_and_resumes_with_another_sheet_of_samples(tmp_path):
    long = (Stage(name="long", images=4000, batches={16: 4}, rates=(1e-3, 1e-3)),)
    assert not training(tmp_path, long, minutes=0).train()
    again = training(tmp_path, long, minutes=0)
    assert again.step == 1
    assert not again.train()
    assert [path.name for path in sorted(tmp_path.rglob("*.png"))] == [
        "loss.png",
        "samples-000001.png",
        "samples-000002.png",
    ]


def test_the_loss_falls(tmp_path):
    stage = Stage(name="one", images=400, batches={16: 8}, rates=(1e-2, 1e-3))
    training(tmp_path, (stage,)).train()
    loss = losses(tmp_path)
    assert sum(loss[-10:]) < 0.8 * sum(loss[:10])


def test_devices_draw_different_scenes_of_the_same_size():
    stage = Stage(name="one", images=100, batches={16: 3, 32: 2}, rates=(1e-3, 1e-3))
    batches, steps = ImageBatches(stage, untrained_pipeline(**TINY), 0, 2), stage.steps(2)
    assert steps == 100 / 5
    for step in range(steps):
        ours, theirs = batches[2 * step], batches[2 * step + 1]
        assert ours.side == theirs.side
        assert ours.t5_ids.shape == theirs.t5_ids.shape
        assert not torch.equal(ours.scenes.objects, theirs.scenes.objects)
        assert torch.equal(ours.t5_ids, batches[2 * step].t5_ids)
    assert {batches[2 * step].side for step in range(steps)} == {16, 32}


def test_no_batch_holds_a_scene_kept_for_evaluation():
    stage = Stage(name="one", images=4000, batches={16: 100}, rates=(1e-3, 1e-3))
    pipeline = untrained_pipeline(**TINY)
    batches = ImageBatches(stage, pipeline, 0, 1)
    trained = {text for step in range(40) for text in pipeline.tokenizer_2.batch_decode(batches[step].t5_ids, True)}
    kept = [scene.caption for _, scene in zip(range(2000), scenes(0, evaluation=True), strict=False)]
    assert len(trained) > 3000
    assert not trained & {pipeline.tokenizer_2.decode(pipeline.tokenizer_2(text).input_ids, True) for text in kept}


def test_the_loss_of_the_true_velocity_is_zero_and_noise_levels_follow_the_size():
    pipeline = untrained_pipeline(**TINY)
    batch = ImageBatches(Stage(name="one", images=4, batches={16: 4}, rates=(0.0, 0.0)), pipeline, 0, 1)[0]
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
    painter = VelocityModel(untrained_pipeline(**TINY))
    painter.initialise()
    ids = torch.randint(3, 50, (2, 64))
    velocity = painter(torch.randn(2, 16, 16), torch.rand(2), ids, ids)
    assert velocity.shape == (2, 16, 16)
    assert (velocity == 0).all()
