# pyright: basic
"""What a run trains, and with which optimizers; as a part of its checkpoints whole, even where FSDP has spread it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

__all__ = ["Trained", "whole", "with_muon"]


def whole(state: Any) -> Any:
    """A nest of lists and dicts with every tensor whole, on every device; all devices must ask together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)


def spread_as(parameter: Tensor, tensor: Any) -> Any:
    """The tensor, spread over devices as the parameter of its shape is."""
    if not isinstance(parameter, DTensor) or getattr(tensor, "shape", None) != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def with_muon(
    parameters: Iterable[tuple[str, nn.Parameter]], inside: Callable[[str], bool], rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for everything else; one rate fits both.

    Args:
        parameters: By name.
        inside: Whether a name is one of a block's.
        rate: Of learning.
        weight_decay: Of the matrices.

    Source: Muon is Jordan et al. 2024; that it takes AdamW's rates, arXiv 2502.16982.
    """
    matrices, others = [], []
    for name, parameter in parameters:
        (matrices if parameter.ndim == 2 and inside(name) else others).append(parameter)
    return [
        torch.optim.Muon(matrices, rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


class Trained:
    """Weights, their optimizers, and a moving average of them if there is one.

    Args:
        weights: All of them.
        optimizers: Of one part of the weights each.
        average: Of all.
    """

    def __init__(self, weights: Sequence[nn.Parameter], optimizers: Sequence[Any], average: EMAModel | None = None):
        self.weights, self.optimizers, self.average = weights, optimizers, average
        self._state: dict[str, Any] = {}

    def follow(self) -> None:
        """Let the average follow the weights, after a step of the optimizer."""
        if self.average:
            self.average.step(self.weights)

    def gather(self) -> None:
        """Bring everything together; all devices do so before one of them writes."""
        state = {"weights": list(self.weights), "optimizers": [one.state_dict() for one in self.optimizers]}
        self._state = whole(state | ({"average": self.average.state_dict()} if self.average else {}))

    def state_dict(self) -> dict[str, Any]:
        """What was gathered."""
        return self._state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave."""
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(spread_as(weight, saved))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            moments = {
                index: {name: spread_as(weights[index], value) for name, value in entry.items()}
                for index, entry in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": moments})
        if self.average:
            means = state["average"]["shadow_params"]
            means = [spread_as(*pair).to(pair[0].device) for pair in zip(self.weights, means, strict=True)]
            self.average.load_state_dict({**state["average"], "shadow_params": means})
