# pyright: basic, reportMissingImports=false
"""Benchmark of Sub-CP: examples for in-context learning selected from large pools, checked and then timed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from foveate.apps.bench.table import TableColumn, megabytes, results_table
from foveate.apps.console import Commit, Device, Out, Rounds, numbers, run_and_save
from foveate.methods import SubCP
from foveate.methods.example_blocks import Blocks
from foveate.methods.sub_cp import Selection
from foveate.ops import dispatch
from foveate.ops.facility_location import best_similarity, facility_location
from foveate.utils.device import choose_device, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import now, peak_memory
from lab.bench.common import spread

__all__ = ["Settings", "bench_examples", "main", "table_of"]

INPUTS = "random", "clusters"
CLUSTERS = 200
CHECKED = 2000  # pool size of the check against the full similarity matrix
PEER_LIMIT = 5000  # largest pool for apricot-select, which builds the full matrix


class Settings(NamedTuple):
    """Settings of the benchmark; the options of `main` describe them."""

    device: torch.device
    picks: int = 1024
    blocks: int = 64
    dim: int = 384
    rounds: int = 3


def bench_examples(pools: Sequence[int], settings: Settings, track: Track = silent) -> Iterator[dict[str, Any]]:
    """Yield the times to select and partition examples so far after each pool, ready for JSON.

    Before timing, the selection from a small pool must equal the greedy selection on the full similarity matrix in
    float64 on the CPU. The gains of each timed selection must add up to its coverage of the pool.

    Embeddings are random directions, or 200 clusters of directions. If apricot-select is installed, it selects from
    pools of up to 5,000 on the CPU, including the time to build its similarity matrix.

    Args:
        pools: Numbers of examples to select from.
        settings: Settings of the benchmark.
        track: Shows progress.

    Raises:
        ValueError: If a pool is too small, or a check fails.
    """
    if small := [pool for pool in pools if pool < settings.picks]:
        raise ValueError(f"cannot choose {settings.picks} of {small[0]} examples: use --picks {small[0]}")
    for inputs in INPUTS:
        _check(inputs, settings)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "examples for in-context learning",
        "picks": settings.picks,
        "blocks": settings.blocks,
        "dim": settings.dim,
        "device": settings.device.type,
        "backend": dispatch.choose("coverage_drops", settings.device, torch.float32, settings.dim).name,
        "rounds": settings.rounds,
        "rows": rows,
        "versions": versions(),
    }
    for size in pools:
        for inputs in INPUTS:
            rows += _timed(inputs, size, settings, track)
            yield result


def embeddings(inputs: str, size: int, settings: Settings) -> Tensor:
    """Random unit vectors [size, dim], the same in every run."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(size, settings.dim, generator=draw)
    if inputs == "clusters":
        centres = torch.randn(CLUSTERS, settings.dim, generator=draw)
        rows = centres[torch.randint(CLUSTERS, (size,), generator=draw)] + 0.7 * rows
    return normalize(rows, dim=1).to(settings.device)


def _check(inputs: str, settings: Settings) -> None:
    size, picks = max(CHECKED, settings.picks), min(settings.picks, CHECKED // 4)
    pool = embeddings(inputs, size, settings)
    want = facility_location((pool.cpu().double() @ pool.cpu().double().T).clamp(min=0), picks)
    if not torch.equal(SubCP(candidates=None).select(pool, picks).ids.cpu(), want):
        raise ValueError(f"the selection differs from greedy on the full similarity matrix ({inputs}): not timing it")


def _timed(inputs: str, size: int, settings: Settings, track: Track) -> list[dict[str, Any]]:
    pool = embeddings(inputs, size, settings)
    dealing = SubCP(blocks=settings.blocks, block_size=settings.picks // settings.blocks, candidates=None)
    calls: dict[str, Callable[[], Any]] = {
        f"select {settings.picks:,}": partial(SubCP(candidates=None).select, pool, settings.picks),
        f"select {settings.picks:,} from drawn candidates": partial(SubCP().select, pool, settings.picks),
        f"partition into {settings.blocks} blocks": partial(dealing.partition, pool),
    }
    if size <= PEER_LIMIT and find_spec("apricot"):
        calls[f"apricot-select, CPU: select {settings.picks:,}"] = partial(_apricot, pool.cpu(), settings.picks)
    advance = track(f"{size:,} examples, {inputs}", len(calls) * (settings.rounds + 1))
    rows: list[dict[str, Any]] = []
    first = None
    for name, call in calls.items():
        chosen = call()
        first = first or chosen
        error = _error(pool, chosen)
        if not error < 1e-3:
            raise ValueError(f"{name} of {size} examples: gains and coverage differ by {error:.1e}: not timing it")
        rows.append({"pool": size, "inputs": inputs, "variant": name, "error": error})
        if isinstance(chosen, Selection):
            rows[-1]["picks_as_ours"] = int((chosen.ids.cpu() == first.ids.cpu()).sum())
            rows[-1]["coverage"] = chosen.coverage
        rows[-1]["peak_bytes"] = peak_memory(call, settings.device) if "apricot" not in name else None
        advance()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(settings.rounds):
        for call, seconds in zip(calls.values(), taken, strict=True):
            began = now(settings.device)
            call()
            seconds.append(now(settings.device) - began)
            advance()
    for row, seconds in zip(rows, taken, strict=True):
        row |= spread(seconds)
    return rows


def _error(pool: Tensor, chosen: Any) -> float:
    """Relative difference between the reported coverage of a choice and its coverage computed here."""
    if isinstance(chosen, Blocks):
        ids = torch.tensor([i for block in chosen.ids for i in block])
        said = chosen.report().union_coverage * len(pool)
    else:
        ids, said = chosen.ids, chosen.gains.double().sum().item()
    served = best_similarity(pool, pool[ids.to(pool.device)]).double().sum().item()
    return abs(said - served) / served


def _apricot(pool: Tensor, picks: int) -> Selection:
    from apricot import FacilityLocationSelection

    similarity = (pool @ pool.T).clamp(min=0).double().numpy()
    chooser = FacilityLocationSelection(picks, metric="precomputed", optimizer="lazy").fit(similarity)
    gains = torch.as_tensor(chooser.gains)
    return Selection(torch.as_tensor(chooser.ranking), gains, float(gains.sum()) / len(pool))


COLUMNS: list[TableColumn] = [
    ("", "variant", str),
    *(
        (title, key, "{:.3g}".format)
        for title, key in (("s", "median_s"), ("fastest", "fastest_s"), ("slowest", "slowest_s"))
    ),
    ("MB", "peak_bytes", megabytes),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by pool."""
    return results_table(result["rows"], COLUMNS, lambda row: f"{row['pool']:,} examples, {row['inputs']}")


def main(
    pool: Annotated[str, typer.Option(help="Sizes of the pool of examples.")] = "5000,20000,100000",
    picks: Annotated[int, typer.Option(min=1, help="Number of examples to select.")] = 1024,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks to split them into.")] = 64,
    dim: Annotated[int, typer.Option(min=1, help="Dimension of an embedding.")] = 384,
    rounds: Rounds = 3,
    out: Out = Path("bench"),
    device: Device = "auto",
    commit: Commit = "",
) -> None:
    """Time Sub-CP: select examples from large pools and split them into blocks.

    If apricot-select is installed, its selection on the CPU is timed too, for pools of up to 5,000 examples.

    python -m lab examples                                                    # a GPU

    python -m lab examples --pool 1000,4000 --picks 256 --blocks 16           # a CPU
    """
    if picks % blocks:
        raise ValueError(
            f"{picks} examples do not fill {blocks} blocks evenly: use --picks {picks // blocks * blocks}"
        )
    where = choose_device(device)
    run = partial(bench_examples, numbers(pool), Settings(where, picks, blocks, dim, rounds))
    run_and_save(out / f"examples-{where.type}.json", commit, run, table_of)
