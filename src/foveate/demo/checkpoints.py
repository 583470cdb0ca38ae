"""Checkpoints that survive anything: written under another name, renamed when whole, the newest whole one found again."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from foveate.files import write_whole

__all__ = ["newest_checkpoint", "write_checkpoint"]

KEPT = 2


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Keep `state` as the checkpoint of a step; all but the two newest are deleted."""
    file = io.BytesIO()
    torch.save(state, file)
    write_whole(folder / f"{step:08}.pt", file.getvalue())
    for old in _checkpoints(folder)[:-KEPT]:
        old.unlink()


def newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state that was written last and can be read, or None."""
    for path in reversed(_checkpoints(folder)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            continue
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.pt"))
