"""Laws of checkpoints: the newest complete one is resumed, and never one of another run."""

import pytest
import torch

from foveate.training.checkpoints import resume, write_checkpoint


def part(value):
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_the_newest_complete_checkpoint_is_resumed(tmp_path):
    assert resume(tmp_path / "nowhere", {"layer": part(0)}, {}) == 0
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, {"layer": part(step)}, {"seed": 0})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000000002.pt", "000000003.pt"]
    layer = part(0)
    assert resume(tmp_path, {"layer": layer}, {"seed": 0}) == 3
    assert layer.weight.item() == 3
    newest = tmp_path / "000000003.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    (tmp_path / "000000004.pt").write_bytes(b"")
    (tmp_path / "000000005.pt.part").write_bytes(b"half")
    assert resume(tmp_path, {"layer": layer}, {"seed": 0}) == 2
    assert layer.weight.item() == 2


def test_a_run_of_other_settings_is_refused(tmp_path):
    write_checkpoint(tmp_path, 1, {"layer": part(1)}, {"seed": 0})
    with pytest.raises(ValueError, match=r"is of a run with .*0.*, not .*1.*: name another folder"):
        resume(tmp_path, {"layer": part(0)}, {"seed": 1})
