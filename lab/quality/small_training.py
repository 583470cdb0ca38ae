"""Training of what is small enough for a plain loop: readers of lab/quality/examples.py and lab/quality/one_row.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foveate.training.checkpoints import resume, write_checkpoint

__all__ = ["trained"]

KEPT_EVERY = 250  # steps


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    rate: Callable[[int], float],
    steps: int,
    folder: Path,
    settings: dict[str, Any],
    advance: Callable[[], None],
) -> None:
    """Train so many steps, from where a run of these settings was broken off; its folder gets checkpoints and log.csv.

    Args:
        model: Is trained, in bfloat16 where it is on a GPU.
        optimizer: Of its weights.
        loss: Of a step.
        rate: Learning rate of a step.
        steps: How many.
        folder: Of the run.
        settings: What makes the run the run it is.
        advance: Is called after every step, first for those of earlier runs.

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
        if (step + 1) % KEPT_EVERY == 0 or step + 1 == steps:
            write_checkpoint(folder, step + 1, parts, settings)
            with (folder / "log.csv").open("a") as log:
                log.write(f"{step + 1},{value.item():.4f}\n")
