"""How attention in FP8 rounds queries, keys and values to e4m3, the 8-bit floating-point format.

1. Softmax ignores what all keys of a head have in common: keys are stored as differences from a mean of theirs.
   Weights add up to 1: values are, too, and their mean is added to the output.
2. Every query has its own scale, keys and values have one for each head. A floating-point format is as exact for small
   numbers as for large ones, so finer scales would gain little.
3. Scales of keys and values are guessed from a sample, so that they are read only once. A head that exceeds its guess
   gets the scale that it needs.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["E4M3", "LARGEST", "MARGIN", "SAMPLES", "SMALLEST", "RoundedInputs", "round_inputs"]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-40  # range that is divided by, so that products of scales are above 0
SAMPLES = 32  # keys of a head, evenly spaced, that give its mean and the guess of its range
MARGIN = 4.0  # guessed range over the range of the sample


class RoundedInputs(NamedTuple):
    """Queries, keys and values in e4m3.

    Attributes:
        q: Queries, divided by their scales.
        k: Keys less their mean, divided by the scale of their head.
        v: Values less their mean, divided by the scale of their head.
        q_scale: Scale of each query.
        scales: Scales of the keys and of the values of each head.
        means: Mean of the keys and of the values of each head.
    """

    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch heads keys head_dim"]
    v: Float[Tensor, "batch heads keys head_dim"]
    q_scale: Float[Tensor, "batch heads queries"]
    scales: Float[Tensor, "2 batch heads"]
    means: Float[Tensor, "2 batch heads head_dim"]

    def dequantized(self) -> tuple[Tensor, Tensor, Tensor]:
        """The float32 queries, keys and values that these stand for."""
        q = self.q.float() * self.q_scale[..., None]
        k, v = (
            x.float() * scale[..., None, None] + mean[..., None, :]
            for x, scale, mean in zip((self.k, self.v), self.scales, self.means, strict=True)
        )
        return q, k, v


def round_inputs(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys head_dim"],
) -> RoundedInputs:
    """The inputs of attention in e4m3. This is the definition of what the kernels do."""
    q = q.float()
    q_scale = _scale(q.abs().amax(3))
    (k, k_scale, k_mean), (v, v_scale, v_mean) = map(_centred, (k, v))
    q = (q / q_scale[..., None]).to(E4M3)
    return RoundedInputs(q, k, v, q_scale, torch.stack([k_scale, v_scale]), torch.stack([k_mean, v_mean]))


def _centred(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values in e4m3, the scale of each head, and the mean that was subtracted."""
    x, tokens = x.float(), x.shape[2]
    some = x[:, :, torch.arange(SAMPLES, device=x.device) * tokens // SAMPLES]
    mean = some.mean(2)
    guess = MARGIN * (some - mean[:, :, None]).abs().amax((2, 3))
    x = x - mean[:, :, None]
    scale = _scale(torch.maximum(guess, x.abs().amax((2, 3))))
    return (x / scale[..., None, None]).to(E4M3), scale, mean


def _scale(largest: Tensor) -> Tensor:
    """The scale with which `largest` becomes the largest number of e4m3."""
    return largest.clamp(min=SMALLEST) / LARGEST
