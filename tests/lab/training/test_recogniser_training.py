"""Laws of the recogniser's training."""

import pytest
import torch
from lab.training import loop
from lab.training import recogniser as training
from lab.training.recogniser import train_recogniser


@pytest.fixture
def small(monkeypatch):
    """Training in a second: two small pictures a step, a checkpoint every two steps."""
    monkeypatch.setattr(loop, "CHECKPOINT_STEPS", 2)
    monkeypatch.setattr(training, "SIDES", (64,))
    return {"steps": 5, "batch": 2, "device": "cpu"}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, small):
    whole = train_recogniser(tmp_path / "whole", **small)
    steps = []

    def cut_off():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_recogniser(tmp_path / "parts", **small, advance=cut_off)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(ValueError, match="name another folder"):
        train_recogniser(tmp_path / "parts", **small, seed=1)
    steps = [*range(10)]
    resumed = train_recogniser(tmp_path / "parts", **small, advance=cut_off)
    assert len(steps) == 15  # a progress bar is full
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_training_leaves_the_global_generator_alone(tmp_path, small):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_recogniser(tmp_path / "out", **small)
    assert torch.equal(torch.rand(3), expected)
