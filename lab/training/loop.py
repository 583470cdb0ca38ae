# pyright: basic, reportPrivateImportUsage=false
"""The training loop of small models on one device. Larger ones are trained by `foveate.training.run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained

__all__ = ["train"]

CHECKPOINT_STEPS = 250


def train(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    loss: Callable[[int], Tensor],
    steps: int,
    settings: dict[str, Any],
    advance: Callable[[], None] = lambda: None,
    *,
    max_norm: float = 1.0,
) -> None:
    """Train a model in place. An interrupted run with the same settings is resumed.

    Args:
        folder: Folder of checkpoints and log.csv.
        model: Model to train.
        optimizer: Optimizer of its weights.
        schedule: Schedule of the optimizer's learning rate.
        loss: Loss of a step.
        steps: Number of steps.
        settings: Settings that identify the run.
        advance: Called after every step, including steps of an earlier run.
        max_norm: Norm to which gradients are clipped.

    Raises:
        ValueError: If the folder holds a run with other settings.
    """
    parts = {"model": Trained(model, [optimizer]), "schedule": schedule}
    done = resume(folder, parts, settings)
    for _ in range(done):
        advance()
    for step in range(done, steps):
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            write_checkpoint(folder, step + 1, parts, settings)
            with (folder / "log.csv").open("a") as log:
                log.write(f"{step + 1},{value.item():.4f}\n")
        advance()
