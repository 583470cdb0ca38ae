"""What the small Llama readers share: configuration, questions side by side after a text, and a training loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained

__all__ = ["HEAD_DIM", "llama_config", "parallel_questions", "train"]

CHECKPOINT_STEPS = 250
HEAD_DIM = 32


def llama_config(vocab_size: int, width: int, layers: int, **options: Any) -> LlamaConfig:
    """Configuration of a small Llama with heads of 32 channels; `options` overrides it."""
    usual: dict[str, Any] = {"intermediate_size": 2 * width, "bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        **usual | options,
    )


def parallel_questions(
    tokens: int, text: int, question: int
) -> tuple[Int[Tensor, "tokens"], Bool[Tensor, "tokens tokens"]]:
    """Positions and causal attention mask of several questions about one text.

    Each question is positioned directly after the text, and attends to the text and to itself.

    Args:
        tokens: Number of tokens of the text and all questions.
        text: Number of tokens of the text.
        question: Number of tokens of each question.
    """
    index = torch.arange(tokens)
    part = (index - text).div(question, rounding_mode="floor").clamp(min=-1)  # -1 is the text
    visible = (part == -1) | (part[:, None] == part)
    return index - part.clamp(min=0) * question, visible & (index[:, None] >= index)


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
    parts = {"model": Trained(model, [optimizer])}
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
