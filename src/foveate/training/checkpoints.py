# pyright: basic, reportPrivateImportUsage=false
"""Checkpoints of torch.distributed: every process writes its part, and any number of processes can read them."""

import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

__all__ = ["resume", "write_checkpoint"]

KEPT = 2
CHECKPOINT = 9 * "[0-9]"  # the number of steps names its folder
COMPLETE = ".metadata"  # written last, and renamed into place


@contextmanager
def _clear_errors() -> Generator[None]:
    """Context that raises an OSError of any process in all of them, and hides the warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except dcp.api.CheckpointException as error:
            for rank, (cause, _) in error.failures.items():
                if isinstance(cause, OSError):
                    raise OSError(f"the checkpoint failed on rank {rank}: {cause}") from error
            raise


@_clear_errors()
def write_checkpoint(folder: Path, step: int, parts: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write the state of all parts after a step, and delete all but the two newest checkpoints.

    All processes call it together, with a folder that they share.

    Args:
        folder: Folder of the run.
        step: Number of steps so far.
        parts: Objects with `state_dict` and `load_state_dict`, by name.
        settings: Settings that identify the run; `resume` refuses to load a checkpoint with others.
    """
    dcp.save({"settings": str(settings), **parts}, checkpoint_id=folder / f"{step:09}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        kept = _newest_first(folder)[:KEPT]
        for old in set(folder.glob(f"{CHECKPOINT}/")) - set(kept):
            (old / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(old)


@_clear_errors()
def resume(folder: Path, parts: dict[str, Any], settings: dict[str, Any]) -> int:
    """Load the newest complete checkpoint into all parts. Returns its step, or 0 if there is none.

    All processes call it together; their number may differ from the run that wrote the checkpoint.

    Raises:
        ValueError: If the checkpoint is from a run with other settings.
    """
    newest = _newest_first(folder)[:1]
    if dist.is_initialized():  # the first process chooses
        found = [newest]
        dist.broadcast_object_list(found)
        [newest] = found
    if not newest:
        return 0
    [path] = newest
    saved = {"settings": ""}
    dcp.load(saved, checkpoint_id=path)
    if saved["settings"] != str(settings):
        raise ValueError(f"{path} is from a run with {saved['settings']}, not {settings}: name another folder")
    dcp.load(dict(parts), checkpoint_id=path)
    return int(path.name)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path.parent for path in folder.glob(f"{CHECKPOINT}/{COMPLETE}")), reverse=True)
