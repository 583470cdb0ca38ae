"""Laws of checkpoints: the newest complete one is resumed, and never one of another run."""

from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from foveate.training.checkpoints import resume, write_checkpoint


def part(value):
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_the_newest_complete_checkpoint_is_resumed(tmp_path, monkeypatch):
    assert resume(tmp_path / "nowhere", {"layer": part(0)}, {}) == 0
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, {"layer": part(step)}, {"seed": 0})
    assert {path.name for path in tmp_path.iterdir()} == {"000000002", "000000003"}
    layer = part(0)
    assert resume(tmp_path, {"layer": layer}, {"seed": 0}) == 3
    assert layer.weight.item() == 3
    with monkeypatch.context() as power_cut:
        power_cut.setattr(FileSystemWriter, "finish", Mock(side_effect=OSError("no space left")))
        with pytest.raises(OSError, match="the checkpoint failed on rank 0: no space left"):
            write_checkpoint(tmp_path, 4, {"layer": part(4)}, {"seed": 0})
    assert list((tmp_path / "000000004").iterdir())
    assert resume(tmp_path, {"layer": layer}, {"seed": 0}) == 3
    write_checkpoint(tmp_path, 5, {"layer": part(5)}, {"seed": 0})
    assert {path.name for path in tmp_path.iterdir()} == {"000000003", "000000005"}


def test_a_run_of_other_settings_is_refused(tmp_path):
    write_checkpoint(tmp_path, 1, {"layer": part(1)}, {"seed": 0})
    with pytest.raises(ValueError, match=r"is from a run with .*0.*, not .*1.*: name another folder"):
        resume(tmp_path, {"layer": part(0)}, {"seed": 1})


def test_other_folders_beside_checkpoints_stay(tmp_path):
    (tmp_path / "2024-pictures").mkdir()
    (tmp_path / "2024-pictures" / ".metadata").write_text("mine")
    for step in range(1, 5):
        write_checkpoint(tmp_path, step, {"layer": part(step)}, {"seed": 0})
    assert resume(tmp_path, {"layer": part(0)}, {"seed": 0}) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"2024-pictures", "000000003", "000000004"}
