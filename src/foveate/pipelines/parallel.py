# pyright: basic, reportPrivateImportUsage=false
"""One image over several processes, by the context parallelism of diffusers."""

from typing import Any
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from foveate.diffusers.apply import denoisers

__all__ = ["enable_parallelism", "share_pictures"]


def share_pictures(pipeline: Any, ranks: int) -> None:
    """Divide the tokens of every image over all processes, which must then generate the same images.

    Raises:
        ValueError: If diffusers has no plan for the model, or its heads do not divide.
    """
    models: list[Any] = [*denoisers(pipeline).values()]
    for model in models:
        if getattr(model, "_cp_plan", None) is None:
            raise ValueError(
                f"diffusers has no plan to divide an image of {type(model).__name__} over processes: "
                "use one process, or let each process generate its own images"
            )
        heads = model.config.num_attention_heads
        if not divides(heads, ranks):
            fitting = ", ".join(str(n) for n in range(2, heads + 1) if divides(heads, n))
            raise ValueError(
                f"{heads} attention heads of {type(model).__name__} do not divide over {ranks} processes: "
                f"use {fitting}, or let each process generate its own images"
            )
    for model in models:
        enable_parallelism(model, ulysses_degree=ranks, ulysses_anything=True)


def divides(heads: int, ranks: int) -> bool:
    """Whether every process gets a head, if all but the last get equally many and the last may get fewer."""
    most = -(-heads // ranks)
    return most * ranks - heads < most


def enable_parallelism(model: Any, cp_plan: Any = None, **context: Any) -> None:
    """`model.enable_parallelism(config=ContextParallelConfig(**context))`, also for processes without accelerators."""
    config = ContextParallelConfig(**context)
    config.mesh = init_device_mesh(model.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    number = max(1, torch.accelerator.device_count())  # diffusers divides by it
    with patch.object(torch.accelerator, "device_count", return_value=number):
        model.enable_parallelism(config=config, cp_plan=cp_plan)
