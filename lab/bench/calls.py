# pyright: basic
"""Benchmark of calls from Python against their CUDA graphs, for Foveate and its peers, checked before timing."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from foveate.apps.bench.table import TableColumn, results_table
from foveate.apps.console import Commit, Device, Out, Rounds, run_and_save
from foveate.methods import HilbertA
from foveate.utils.device import choose_device
from foveate.utils.progress import Track, silent
from lab.bench import attention, log_linear
from lab.bench.common import TIMES
from lab.bench.peers import Peer, peers, versions_with_peers

__all__ = ["bench_calls", "main", "table_of"]

BLOCK = attention.Case(1024, HilbertA(tiles=16))
LOG_LINEAR = [log_linear.Case(tokens, 8, 64, None, 8, 16, "balanced") for tokens in (4096, 16384, 65536)]


def bench_calls(
    device: torch.device, rounds: int = 15, track: Track = silent, longest: float = 1.0
) -> Iterator[dict[str, Any]]:
    """Yield the measurements so far after every case: rows of `bench_attention` and `bench_log_linear`.

    Args:
        device: A GPU.
        rounds: Measurements of each call, interleaved.
        track: Shows progress.
        longest: Longest call in seconds; slower peers are skipped.
    """
    done: list[dict[str, Any]] = []
    result: dict[str, Any] = {"what": "calls", "cores": os.cpu_count(), "versions": versions_with_peers()}
    dtype = torch.bfloat16
    for backward in (False, True):
        settings = log_linear.Settings(device, dtype, backward, longest=longest, rounds=rounds)
        same = {"backward": backward, "rounds": rounds}
        for run, op in (
            (partial(attention.bench_attention, [BLOCK], device, dtype, everyone=_peers, **same), "block"),
            (partial(log_linear.bench_log_linear, LOG_LINEAR, settings), "log-linear"),
        ):
            rows: list[dict[str, Any]] = []
            for found in run(track=track):
                rows = [{"op": op, "backward": backward, **row} for row in found["rows"]]
                yield result | {"rows": done + rows}
            done += rows


def _peers(device: torch.device, dtype: torch.dtype, head_dim: int, backward: bool) -> list[Peer]:
    """All peers except FlexAttention, whose compilation takes longer than everything else."""
    return [peer for peer in peers(device, dtype, head_dim, backward) if peer.name != "FlexAttention"]


COLUMNS: list[TableColumn] = [("", "peer", str), *TIMES, ("error", "error", "{:.0e}".format)]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case."""
    return results_table(result["rows"], COLUMNS, _heading)


def _heading(row: dict[str, Any]) -> str:
    what = row["case"] if row["op"] == "block" else f"{row['tokens']:,} tokens, {row['series']}"
    return what + (", forward and backward" if row["backward"] else ", forward")


def main(rounds: Rounds = 15, out: Out = Path("bench"), device: Device = "auto", commit: Commit = "") -> None:
    """Time calls of block attention and log-linear attention from Python, and their CUDA graphs.

    "enqueued" is the CPU's share: the time until Python returns.

    python -m lab calls                  # a GPU: about 2 minutes
    """
    where = choose_device(device)
    run_and_save(out / f"calls-{where.type}.json", commit, partial(bench_calls, where, rounds), table_of)
