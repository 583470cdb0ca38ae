# pyright: basic
"""Processes started by `torchrun` or `accelerate launch`."""

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from foveate.utils.files import write_whole

if TYPE_CHECKING:  # accelerate is optional
    from accelerate import PartialState

__all__ = ["check_shared", "divide", "join", "leave", "rank_name"]

T = TypeVar("T")


def join(device: str = "auto") -> "PartialState":
    """Distributed state of this process. A single process is the main process.

    Call it before anything else, in every process. Later calls return the same state.

    Args:
        device: Device name. For several processes "auto" or "cpu"; with "auto" each uses the GPU of its local rank.

    Raises:
        ValueError: If several processes are to share one device.
    """
    import torch
    from accelerate import PartialState

    launched = "LOCAL_RANK" in os.environ
    if launched and device not in ("auto", "cpu"):
        raise ValueError(
            f"several processes run on auto or cpu, not on {device}: CUDA_VISIBLE_DEVICES says which GPUs there are"
        )
    cpu = device == "cpu" or (launched and not torch.cuda.is_available())
    # sizes and objects go over gloo, so that the GPU never waits for them
    backend: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl"} if launched and not cpu else {}
    return PartialState(cpu=cpu, timeout=timedelta(days=1), **backend)  # processes that finish early wait


def rank_name() -> str:
    """Name such as "rank 3 of 8 on gpu-node-2", with ranks from 0; empty for a single process."""
    rank, ranks = (os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE"))
    return f"rank {rank} of {ranks} on {socket.gethostname()}" if int(ranks) > 1 else ""


def leave() -> None:
    """Leave the process group and exit. No-op for a single process."""
    if "torch" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo threads may use the interpreter during shutdown, which aborts the process


def divide(items: Sequence[T], *, together: bool = False) -> list[T]:
    """Items assigned to this process.

    All processes use the list of the main process, because lists read from a shared folder can differ.

    Args:
        items: All items.
        together: Whether all processes get all items.
    """
    from accelerate.utils import broadcast_object_list

    agreed: Any = broadcast_object_list([[*items]])[0]
    if together:
        return agreed
    with join().split_between_processes(agreed) as mine:
        return list[Any](mine)


def check_shared(folder: Path) -> None:
    """Raise a ValueError unless all processes see the same folder. The main process creates it."""
    from accelerate.utils import broadcast_object_list, gather_object

    state = join()
    if state.num_processes == 1:
        return
    [probe] = broadcast_object_list([f".{uuid4()}"])
    if state.is_main_process:
        write_whole(folder / probe, b"")
    state.wait_for_everyone()
    visible = gather_object([(folder / probe).exists()])
    if state.is_main_process:
        (folder / probe).unlink()
    if not all(visible):
        raise ValueError(f"not all nodes see {folder} of the first one: name a folder they share")
