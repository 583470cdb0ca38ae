# pyright: basic
"""Features of pictures by a DINO model, in which papers measure the effect of token merging."""

from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

__all__ = ["load_dino"]

BATCH = 32


def load_dino(model: str, device: torch.device) -> Callable[[Sequence[Image.Image]], Tensor]:
    """A function that returns the class tokens [pictures, dim] of a DINO or DINOv2 model.

    Args:
        model: Hub id or folder, for example "facebook/dino-vits16".
        device: Device to run on, in float32.

    Raises:
        ValueError: If the model cannot be loaded.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(model, use_fast=False)
        network = AutoModel.from_pretrained(model).to(device).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {model}: {str(error).strip().splitlines()[0]}") from error

    @torch.no_grad()
    def features(pictures: Sequence[Image.Image]) -> Tensor:
        parts = [
            processor(images=list(pictures[start : start + BATCH]), return_tensors="pt").to(device)
            for start in range(0, len(pictures), BATCH)
        ]
        return torch.cat([network(**part).last_hidden_state[:, 0] for part in parts])

    return features
