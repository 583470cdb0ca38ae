"""Error of token merging on features, without a model."""

from collections.abc import Callable
from statistics import mean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from foveate.methods.base import TokenMerging

__all__ = ["FEATURES", "reconstruction_error"]

CHANNELS = 640  # channels of SDXL's largest feature maps with attention

Features = Float[Tensor, "1 channels rows columns"]


def _random(side: int, lots: torch.Generator) -> Features:
    return torch.randn(1, CHANNELS, side, side, generator=lots)


def _smooth(side: int, lots: torch.Generator) -> Features:
    """Noise, up-sampled by a factor of 4, plus a tenth of full-resolution noise."""
    coarse = torch.randn(1, CHANNELS, side // 4, side // 4, generator=lots)
    return interpolate(coarse, (side, side), mode="bilinear") + 0.1 * _random(side, lots)


FEATURES: dict[str, Callable[[int, torch.Generator], Features]] = {"random": _random, "smooth": _smooth}


def reconstruction_error(method: TokenMerging, features: str, side: int, device: torch.device) -> float:
    """Mean of ||unmerge(merge(x)) - x|| / ||x|| over an early and a late block, which may merge differently.

    This does not measure image quality: the features do not come from a model, and there is no layer between merge and
    unmerge.

    Args:
        method: Token merging method.
        features: "random" or "smooth", see `FEATURES`.
        side: Tokens along each side.
        device: Device to compute on, in float32.
    """
    regions = method.regions(((side, side),), device=str(device))
    x = FEATURES[features](side, torch.Generator().manual_seed(0)).flatten(2).mT.to(device)[:, regions.order]
    plans = [method.at(depth).plan(x, regions) for depth in (0.25, 0.75)]
    return mean(((plan.unmerge(plan.merge(x)) - x).norm() / x.norm()).item() for plan in plans)
