"""Shared code of the small Llama readers: configuration, and parallel questions after a text."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import LlamaConfig

__all__ = ["HEAD_DIM", "llama_config", "parallel_questions"]

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
