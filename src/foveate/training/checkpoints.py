"""Checkpoints: written under another name and renamed when whole; the newest whole one is found again."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from foveate.utils.files import write_whole

__all__ = ["resume", "write_checkpoint"]

KEPT = 2


def write_checkpoint(folder: Path, step: int, parts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Keep the state of all parts after a step; all but the two newest checkpoints are deleted.

    Args:
        folder: Of the run.
        step: How far the run is.
        parts: Modules, optimizers and the like, by name.
        settings: What makes the run the run it is; `resume` refuses others.
    """
    file = io.BytesIO()
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, "settings": settings, "parts": states}, file)
    write_whole(folder / f"{step:09}.pt", file.getvalue())
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()


def resume(folder: Path, parts: dict[str, Any], settings: dict[str, Any]) -> int:
    """Bring all parts to where the newest whole checkpoint left them: after how many steps; 0 if there is none.

    Raises:
        ValueError: If the checkpoint is of a run with other settings.
    """
    for path in _newest_first(folder):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            continue  # cut off while it was written
        if state["settings"] != settings:
            raise ValueError(f"{path} is of a run with {state['settings']}, not {settings}: name another folder")
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        return state["step"]
    return 0


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.pt"), reverse=True)
