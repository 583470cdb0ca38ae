# pyright: basic
"""The processes that torchrun or accelerate launch started."""

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # accelerate is optional
    from accelerate import PartialState

__all__ = ["join", "rank_name"]


def join(device: str = "auto") -> "PartialState":
    """State of this process among those that were launched together; a process alone is the main process.

    Call it before anything else, in every process. Later calls return the same state.

    Args:
        device: "auto" or "cpu" for several processes, each of which takes the GPU of its local rank.

    Raises:
        ValueError: If several processes are to share one device.
    """
    from accelerate import PartialState

    launched = "LOCAL_RANK" in os.environ
    if launched and device not in ("auto", "cpu"):
        raise ValueError(
            f"--device is auto or cpu with several processes, not {device}: CUDA_VISIBLE_DEVICES says which GPUs there are"
        )
    cpu = device == "cpu" or (launched and not torch.cuda.is_available())
    # sizes and objects go over gloo, so that the GPU never waits for them
    backend: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl"} if launched and not cpu else {}
    return PartialState(cpu=cpu, timeout=timedelta(days=1), **backend)  # those who are done wait for the others


def rank_name() -> str:
    """Such as "rank 3 of 8 on gpu-node-2", counted from 0 as torchrun does; empty for a process alone."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return f"rank {os.environ['RANK']} of {ranks} on {socket.gethostname()}" if ranks > 1 else ""
