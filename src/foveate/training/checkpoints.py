"""Checkpoints: written atomically, and found again by the newest that is complete."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from foveate.utils.files import write_whole

__all__ = ["resume", "write_checkpoint"]

KEPT = 2


def write_checkpoint(folder: Path, step: int, parts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write the state of all parts after a step, and delete all but the two newest checkpoints.

    Args:
        folder: Folder of the run.
        step: Number of steps so far.
        parts: Modules, optimizers and other objects with a `state_dict`, by name.
        settings: Settings that identify the run; `resume` refuses to load a checkpoint with others.
    """
    file = io.BytesIO()
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, "settings": settings, "parts": states}, file)
    write_whole(folder / f"{step:09}.pt", file.getvalue())
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()


def resume(folder: Path, parts: dict[str, Any], settings: dict[str, Any]) -> int:
    """Load the newest complete checkpoint into all parts. Returns its step, or 0 if there is none.

    Raises:
        ValueError: If the checkpoint is that of a run with other settings.
    """
    for path in _newest_first(folder):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            continue  # incomplete
        if state["settings"] != settings:
            raise ValueError(f"{path} is of a run with {state['settings']}, not {settings}: name another folder")
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        return state["step"]
    return 0


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.pt"), reverse=True)
