"""Laws of the autoencoder's training."""

import itertools

import pytest
import torch
from lab.training import loop
from lab.training.vae import train_vae, vae_loss

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.scenes import Scenes, render, scenes
from foveate.apps.demo.untrained import untrained_pipeline

TINY = {"layers": 1, "single_layers": 1, "heads": 2, "rope": (4, 4, 8)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_STEPS", 2)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def train(out, advance=lambda: None):
        vae = untrained_pipeline(**TINY).vae
        train_vae(out, vae, steps=6, pixels=2 * 32**2, sizes=(16, 32), advance=advance)
        return vae

    steps = iter(range(3))
    with pytest.raises(StopIteration):
        train(tmp_path / "broken", lambda: next(steps))
    broken, whole = train(tmp_path / "broken"), train(tmp_path / "whole")
    for ours, theirs in zip(whole.parameters(), broken.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert whole.config.scaling_factor == pytest.approx(broken.config.scaling_factor, rel=1e-4)
    assert whole.config.scaling_factor != 1
    assert not whole.training


def test_the_loss_falls(tmp_path):
    vae = untrained_pipeline(**TINY).vae
    pictures = render(load_atlas(), Scenes.of(list(itertools.islice(scenes(9), 4))), 32) * 2 - 1
    before = vae_loss(vae, pictures).item()
    train_vae(tmp_path, vae, steps=25, pixels=4 * 32**2, sizes=(16, 32))
    assert vae_loss(vae, pictures).item() < 0.7 * before
