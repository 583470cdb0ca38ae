# pyright: basic
"""Trained weights with optimizers and average: on one device, replicated, or sharded by FSDP."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

__all__ = ["Trained", "muon_and_adamw", "unsharded"]

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def unsharded(state: Any) -> Any:
    """A nested state with every sharded tensor gathered, on every device; all devices must call it together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state)


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
    """Trained weights of a model, their optimizers, and an optional moving average.

    Args:
        model: The model as the accelerator prepared it; weights that require no gradient are left out.
        optimizers: Optimizers, each for a part of the weights.
        average: Decay of the moving average of all trained weights; None keeps none.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], average: float | None = None):
        self.model, self.optimizers = model, optimizers
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.average = None if average is None else EMAModel(self.weights, decay=average, foreach=True)

    def update_average(self) -> None:
        """Update the moving average after a step of the optimizer."""
        if self.average:
            self.average.step(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, by names of weights; each process has its shards."""
        weights, optimizers = get_state_dict(self.model, self.optimizers, options=TRAINED)
        average = self.average.state_dict() if self.average else {}
        return {"weights": weights, "optimizers": optimizers, "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        weights, optimizers = state["weights"], state["optimizers"]
        set_state_dict(
            self.model, self.optimizers, model_state_dict=weights, optim_state_dict=optimizers, options=TRAINED
        )
        if self.average:
            self.average.load_state_dict(state["average"])
