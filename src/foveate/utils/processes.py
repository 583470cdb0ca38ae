# pyright: basic
"""The processes that torchrun or accelerate launch started."""

import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # accelerate is optional
    from accelerate import PartialState

__all__ = ["check_shared", "divide", "join", "leave", "rank_name"]

T = TypeVar("T")


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
            f"--device is auto or cpu with several processes, not {device}: "
            "CUDA_VISIBLE_DEVICES says which GPUs there are"
        )
    cpu = device == "cpu" or (launched and not torch.cuda.is_available())
    # sizes and objects go over gloo, so that the GPU never waits for them
    backend: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl"} if launched and not cpu else {}
    return PartialState(cpu=cpu, timeout=timedelta(days=1), **backend)  # those who are done wait for the others


def rank_name() -> str:
    """Such as "rank 3 of 8 on gpu-node-2", counted from 0 as torchrun does; empty for a process alone."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return f"rank {os.environ['RANK']} of {ranks} on {socket.gethostname()}" if ranks > 1 else ""


def leave() -> None:
    """Leave the other processes, at the end of the work."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def divide(items: Sequence[T], *, together: bool = False) -> list[T]:
    """The items that this process is to work on.

    The list of the main process counts: what is missing from a folder changes while others write into it.

    Args:
        items: All items.
        together: Whether all processes work on every item.
    """
    from accelerate.utils import broadcast_object_list

    agreed: Any = broadcast_object_list([[*items]])[0]
    if together:
        return agreed
    with join().split_between_processes(agreed) as mine:
        return list[Any](mine)


def check_shared(paths: Iterable[Path]) -> None:
    """Raise a ValueError if files are missing that other processes have written."""
    there = {folder: {*folder.iterdir()} for folder in {path.parent for path in paths}}
    if missing := [path for path in paths if path not in there[path.parent]]:
        raise ValueError(
            f"{len(missing)} files such as {missing[0]} are not on {socket.gethostname()}: "
            "name a folder with --out that all nodes share"
        )
