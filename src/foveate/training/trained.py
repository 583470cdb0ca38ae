# pyright: basic
"""What a run trains, as a part of its checkpoints: whole in the file, even where FSDP has spread it."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

__all__ = ["Trained", "whole"]


def whole(state: Any) -> Any:
    """A nest of lists and dicts with every tensor whole, on every device; all devices must ask together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)


def spread_as(parameter: Tensor, tensor: Any) -> Any:
    """The tensor, spread over devices as the parameter of its shape is."""
    if not isinstance(parameter, DTensor) or getattr(tensor, "shape", None) != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


class Trained:
    """Weights, their optimizer, and a moving average of them if there is one.

    Args:
        weights: In the optimizer's order.
        optimizer: Of them.
        average: Of them.
    """

    def __init__(self, weights: Sequence[nn.Parameter], optimizer: Any, average: EMAModel | None = None):
        self.weights, self.optimizer, self.average = weights, optimizer, average
        self._state: dict[str, Any] = {}

    def follow(self) -> None:
        """Let the average follow the weights, after a step of the optimizer."""
        if self.average:
            self.average.step(self.weights)

    def gather(self) -> None:
        """Bring everything together; all devices do so before one of them writes."""
        state = {"weights": list(self.weights), "optimizer": self.optimizer.state_dict()}
        self._state = whole(state | ({"average": self.average.state_dict()} if self.average else {}))

    def state_dict(self) -> dict[str, Any]:
        """What was gathered."""
        return self._state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` gave."""
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(spread_as(weight, saved))
        moments = {
            index: {name: spread_as(self.weights[index], value) for name, value in entry.items()}
            for index, entry in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        if self.average:
            means = state["average"]["shadow_params"]
            means = [spread_as(*pair).to(pair[0].device) for pair in zip(self.weights, means, strict=True)]
            self.average.load_state_dict({**state["average"], "shadow_params": means})
