"""Run a function in several processes that form one process group."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(ranks: int, folder: Path, work: Callable[..., None], *args: object) -> None:
    """Run `work(*args)` in `ranks` processes of one gloo group; what one of them raises is raised here.

    Args:
        ranks: Number of processes.
        folder: An empty folder in which they find each other.
        work: A function of a module, since it is pickled.
        args: Its arguments.
    """
    mp.spawn(_run, (ranks, folder / "group", work, args), nprocs=ranks)


def _run(rank: int, ranks: int, path: Path, work: Callable[..., None], args: tuple[object, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    work(*args)
    dist.barrier()
    os._exit(0)  # gloo's threads may ask for the interpreter while it ends, which aborts the process


def as_torchrun() -> None:
    """Give a process of `run` the variables that torchrun sets."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def fork(work: Callable[..., object], *args: object) -> int:
    """The id of a forked process that runs `work(*args)`; it exits with 1 if that raises."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # other threads may hold locks
        child = os.fork()
    if child:
        return child
    try:
        work(*args)
        os._exit(0)
    finally:
        os._exit(1)
