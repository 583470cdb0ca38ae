# pyright: basic
"""The trained weights with their optimizers and average; in checkpoints complete, even where FSDP has sharded them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

__all__ = ["Trained", "muon_and_adamw", "unsharded"]


def unsharded(state: Any) -> Any:
    """A nested state with every sharded tensor gathered, on every device; all devices must call it together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)


def _sharded_like(parameter: Tensor, tensor: Any) -> Any:
    """The tensor, sharded as the parameter is if their shapes agree."""
    if not isinstance(parameter, DTensor) or getattr(tensor, "shape", None) != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def muon_and_adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], inside: Callable[[str], bool], rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for everything else; both take the same learning rate.

    Args:
        parameters: Named parameters.
        inside: Whether a parameter of this name is inside a block.
        rate: Learning rate.
        weight_decay: Weight decay of the matrices.

    Source: Muon is Jordan et al. 2024; the rates of AdamW fit it with the scaling of arXiv 2502.16982.
    """
    matrices, others = [], []
    for name, parameter in parameters:
        (matrices if parameter.ndim == 2 and inside(name) else others).append(parameter)
    return [
        torch.optim.Muon(matrices, rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


class Trained:
    """Trained weights, their optimizers, and a moving average of the weights if there is one.

    Args:
        weights: All trained weights.
        optimizers: Optimizers, each for a part of the weights.
        average: Moving average of all weights.
    """

    def __init__(self, weights: Sequence[nn.Parameter], optimizers: Sequence[Any], average: EMAModel | None = None):
        self.weights, self.optimizers, self.average = weights, optimizers, average
        self._state: dict[str, Any] = {}

    def update_average(self) -> None:
        """Update the moving average after a step of the optimizer."""
        if self.average:
            self.average.step(self.weights)

    def gather(self) -> None:
        """Collect the complete state for `state_dict`; all devices must call it together."""
        state = {"weights": list(self.weights), "optimizers": [one.state_dict() for one in self.optimizers]}
        self._state = unsharded(state | ({"average": self.average.state_dict()} if self.average else {}))

    def state_dict(self) -> dict[str, Any]:
        """The state that `gather` collected."""
        return self._state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(_sharded_like(weight, saved))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            moments = {
                index: {name: _sharded_like(weights[index], value) for name, value in entry.items()}
                for index, entry in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": moments})
        if self.average:
            means = state["average"]["shadow_params"]
            means = [_sharded_like(*pair).to(pair[0].device) for pair in zip(self.weights, means, strict=True)]
            self.average.load_state_dict({**state["average"], "shadow_params": means})
