"""Training loop of the small models in lab/quality/examples.py and lab/quality/one_row.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.training.checkpoints import resume, write_checkpoint

__all__ = ["train"]

CHECKPOINT_STEPS = 250


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    rate: Callable[[int], float],
    steps: int,
    folder: Path,
    settings: dict[str, Any],
    advance: Callable[[], None],
) -> None:
    """Train a model, in bfloat16 on a GPU. An interrupted run with the same settings is resumed.

    Args:
        model: Model to train.
        optimizer: Optimizer of its weights.
        loss: Loss of a step.
        rate: Learning rate of a step.
        steps: Number of steps.
        folder: Folder of checkpoints and log.csv.
        settings: Settings that identify the run.
        advance: Called after every step, including those of an earlier run.

    Raises:
        ValueError: If the folder holds another run.
    """
    device = next(model.parameters()).device.type
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    done = resume(folder, parts, settings)
    for _ in range(done):
        advance()
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = loss(step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            write_checkpoint(folder, step + 1, parts, settings)
            with (folder / "log.csv").open("a") as log:
                log.write(f"{step + 1},{value.item():.4f}\n")
