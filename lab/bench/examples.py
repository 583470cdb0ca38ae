# pyright: basic, reportMissingImports=false
"""Examples for in-context learning picked from large pools: check, then time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from foveate.methods import SubCP
from foveate.methods.sub_cp import Selection
from foveate.ops import dispatch
from foveate.ops.example_blocks import Blocks
from foveate.ops.facility_location import best_similarity, facility_location
from foveate.utils.device import now, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import peak_memory
from foveate.web.report import TILE_COLOURS as COLOURS

__all__ = ["How", "bench_examples", "draw_examples", "table_of"]

INPUTS = "random", "clusters"
CLUSTERS = 200
CHECKED = 2000  # of a pool whose matrix of similarities is looked at
PEER_UP_TO = 5000  # of a pool for a peer that builds that matrix


class How(NamedTuple):
    """What is timed.

    Attributes:
        device: Where.
        picks: Examples to choose.
        blocks: To deal them to.
        dim: Numbers of an embedding.
        rounds: How often each is timed.
    """

    device: torch.device
    picks: int = 1024
    blocks: int = 64
    dim: int = 384
    rounds: int = 3


def bench_examples(pools: Sequence[int], how: How, track: Track = silent) -> Iterator[dict[str, Any]]:
    """After every pool the times so far of choosing examples and of dealing them to blocks, ready for JSON.

    First, from a small pool, the examples are those of the greedy choice from the whole matrix of similarities in
    float64 on the CPU. Of each timed choice what its gains add up to must be what the pool is served.

    Embeddings are random directions, and 200 clusters of them. apricot-select, if it is installed, chooses from
    pools of up to 5,000 on the CPU: it needs the matrix, whose making counts.

    Args:
        pools: Numbers of examples to choose from.
        how: What is timed.
        track: Shows progress.

    Raises:
        ValueError: If a pool is too small, or a check fails.
    """
    if small := [pool for pool in pools if pool < how.picks]:
        raise ValueError(f"cannot choose {how.picks} of {small[0]} examples: use --picks {small[0]}")
    for inputs in INPUTS:
        _check(inputs, how)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "examples for in-context learning",
        "picks": how.picks,
        "blocks": how.blocks,
        "dim": how.dim,
        "device": how.device.type,
        "backend": dispatch.choose("coverage_drops", how.device, torch.float32, how.dim).name,
        "rounds": how.rounds,
        "rows": rows,
        "versions": versions(),
    }
    for size in pools:
        for inputs in INPUTS:
            rows += _timed(inputs, size, how, track)
            yield result


def embeddings(inputs: str, size: int, how: How) -> Tensor:
    """Unit rows [size, dim], the same in every run."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(size, how.dim, generator=draw)
    if inputs == "clusters":
        centres = torch.randn(CLUSTERS, how.dim, generator=draw)
        rows = centres[torch.randint(CLUSTERS, (size,), generator=draw)] + 0.7 * rows
    return normalize(rows, dim=1).to(how.device)


def _check(inputs: str, how: How) -> None:
    size, picks = max(CHECKED, how.picks), min(how.picks, CHECKED // 4)
    pool = embeddings(inputs, size, how)
    want = facility_location((pool.cpu().double() @ pool.cpu().double().T).clamp(min=0), picks)
    if not torch.equal(SubCP().select(pool, picks).ids.cpu(), want):
        raise ValueError(f"other examples than the greedy choice from all similarities ({inputs}): not timing it")


def _timed(inputs: str, size: int, how: How, track: Track) -> list[dict[str, Any]]:
    pool = embeddings(inputs, size, how)
    dealing = SubCP(blocks=how.blocks, block_size=how.picks // how.blocks)
    calls: dict[str, Callable[[], Any]] = {
        f"select {how.picks:,}": partial(SubCP().select, pool, how.picks),
        f"partition into {how.blocks} blocks": partial(dealing.partition, pool),
    }
    if size <= PEER_UP_TO and _apricot_is_there():
        calls[f"apricot-select, CPU: select {how.picks:,}"] = partial(_apricot, pool.cpu(), how.picks)
    advance = track(f"{size:,} examples, {inputs}", len(calls) * (how.rounds + 1))
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
        rows[-1]["peak_bytes"] = peak_memory(call, how.device) if "apricot" not in name else None
        advance()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(how.rounds):
        for call, seconds in zip(calls.values(), taken, strict=True):
            began = now(how.device)
            call()
            seconds.append(now(how.device) - began)
            advance()
    for row, seconds in zip(rows, taken, strict=True):
        row |= {"median_s": median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}
    return rows


def _error(pool: Tensor, chosen: Any) -> float:
    """How far what a choice says of its worth is from how well the pool is served by it."""
    if isinstance(chosen, Blocks):
        ids = torch.tensor([i for block in chosen.ids for i in block])
        said = chosen.report().union_coverage * len(pool)
    else:
        ids, said = chosen.ids, chosen.gains.double().sum().item()
    served = best_similarity(pool, pool[ids.to(pool.device)]).double().sum().item()
    return abs(said - served) / served


def _apricot_is_there() -> bool:
    try:
        import apricot  # noqa: F401
    except ImportError:
        return False
    return True


def _apricot(pool: Tensor, picks: int) -> Selection:
    from apricot import FacilityLocationSelection

    similarity = (pool @ pool.T).clamp(min=0).double().numpy()
    chooser = FacilityLocationSelection(picks, metric="precomputed", optimizer="lazy").fit(similarity)
    gains = torch.as_tensor(chooser.gains)
    return Selection(torch.as_tensor(chooser.ranking), gains, float(gains.sum()) / len(pool))


def table_of(result: dict[str, Any]) -> Table:
    """The measurements, to print: a block of rows for each pool."""
    table = Table("", "s", "fastest", "slowest", "MB")
    for (size, inputs), rows in groupby(result["rows"], lambda row: (row["pool"], row["inputs"])):
        table.add_row(f"[bold]{size:,} examples, {inputs}")
        for row in rows:
            seconds = (f"{row[name]:.3g}" for name in ("median_s", "fastest_s", "slowest_s"))
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
            table.add_row(row["variant"], *seconds, peak)
        table.add_section()
    return table


def draw_examples(result: dict[str, Any]) -> Figure:
    """Seconds over the size of the pool: a line for each thing that is computed, dashed for clusters."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="examples in the pool", ylabel="seconds", xscale="log", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    names = list(dict.fromkeys(row["variant"] for row in result["rows"]))
    for name, colour in zip(names, COLOURS, strict=False):
        for inputs, style in zip(INPUTS, ("-", "--"), strict=True):
            mine = [row for row in result["rows"] if (row["variant"], row["inputs"]) == (name, inputs)]
            axes.plot([row["pool"] for row in mine], [row["median_s"] for row in mine], style, marker="o",
                      color=colour, label=f"{name}, {inputs}")  # fmt: skip
    axes.legend(frameon=False, fontsize=7)
    return figure
