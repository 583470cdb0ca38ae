"""What merging loses of features, whatever a model makes of them."""

from collections.abc import Callable
from statistics import mean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from foveate.methods.base import TokenMerging

__all__ = ["FEATURES", "reconstruction_error"]

CHANNELS = 640  # of SDXL's largest maps with attention

Features = Float[Tensor, "1 channels rows columns"]


def _random(side: int, lots: torch.Generator) -> Features:
    return torch.randn(1, CHANNELS, side, side, generator=lots)


def _smooth(side: int, lots: torch.Generator) -> Features:
    """Noise of a quarter of the side, up-sampled, with a tenth of fresh noise."""
    coarse = torch.randn(1, CHANNELS, side // 4, side // 4, generator=lots)
    return interpolate(coarse, (side, side), mode="bilinear") + 0.1 * _random(side, lots)


FEATURES: dict[str, Callable[[int, torch.Generator], Features]] = {"random": _random, "smooth": _smooth}


def reconstruction_error(method: TokenMerging, features: str, side: int, device: torch.device) -> float:
    """||unmerge(merge(x)) - x|| / ||x||, the mean over an early and a late block, which may merge differently.

    This is no picture's quality: nothing comes between merge and unmerge, and the features are no model's.

    Args:
        method: How to merge.
        features: "random" or "smooth": see `FEATURES`.
        side: Tokens along each side.
        device: Where it is worked out, in float32.
    """
    regions = method.regions(((side, side),), device=str(device))
    x = FEATURES[features](side, torch.Generator().manual_seed(0)).flatten(2).mT.to(device)[:, regions.order]
    plans = [method.at(depth).plan(x, regions) for depth in (0.25, 0.75)]
    return mean(((plan.unmerge(plan.merge(x)) - x).norm() / x.norm()).item() for plan in plans)
