# pyright: basic
"""Benchmark of block-sparse attention in the shapes of FLUX.1, checked and timed beside its peers."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table
from torch import Tensor

from foveate.methods import HilbertA
from foveate.ops.block_attention import portable
from foveate.ops.block_table import BlockTable
from foveate.utils.device import versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import captured, first_line, peak_memory, time_calls
from foveate.web.report import INK
from foveate.web.report import TILE_COLOURS as COLOURS
from lab.bench.peers import Attention, peers

__all__ = ["Case", "bench_attention", "draw_attention", "table_of"]

PIXELS = 16  # along each side of a token of FLUX.1
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """A picture size and the method whose block table is timed."""

    pixels: int
    method: HilbertA

    def table(self, text: int) -> BlockTable:
        """The block table of a layer in which the tiles have slid.

        Raises:
            ValueError: If the side is not a multiple of a token's.
        """
        if self.pixels < PIXELS or self.pixels % PIXELS:
            raise ValueError(
                f"{self.pixels} px do not fit: a token of FLUX.1 is {PIXELS} x {PIXELS} px, use a multiple"
            )
        side = self.pixels // PIXELS
        tables = self.method.plan(((side, side),), text).tables
        return tables[1 % len(tables)]

    def __str__(self) -> str:
        if self.method.tiles == 1:
            return f"{self.pixels} px, dense table"
        return f"{self.pixels} px, {self.method.title}"


def bench_attention(
    cases: Sequence[Case],
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 24,
    head_dim: int = 128,
    text: int = 512,
    backward: bool = False,
    rounds: int = 15,
    track: Track = silent,
) -> Iterator[dict[str, Any]]:
    """The measurements of every peer so far, after every case, ready for JSON.

    The output or the gradients of each peer are first compared with the portable path in float64, on the first and the
    last head of the last sample. A wrong result is not timed, and a peer that cannot run is listed with the reason.

    Args:
        cases: Cases to measure.
        device: Device to run on.
        dtype: Dtype of the random q, k and v.
        batch: Batch size.
        heads: Number of heads.
        head_dim: Channels of a head.
        text: Number of text tokens before the image.
        backward: Time forward and backward together.
        rounds: Measurements of each peer; they take turns.
        track: Shows progress.
    """
    tables = [case.table(text) for case in cases]  # raises before anything is timed
    rows: list[dict[str, Any]] = []
    result = {
        "what": "attention, " + ("forward and backward" if backward else "forward"),
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "text_tokens": text,
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "rows": rows,
        "versions": versions(),
    }
    for case, table in zip(cases, tables, strict=True):
        shape = batch, table.query_tokens, heads, head_dim
        q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
        rows += _case(case, table, (q, k, v), backward, rounds, track)
        yield result


def _case(
    case: Case, table: BlockTable, qkv: tuple[Tensor, ...], backward: bool, rounds: int, track: Track
) -> list[dict[str, Any]]:
    device = qkv[0].device
    everyone = peers(device, qkv[0].dtype, qkv[0].shape[3])
    everything = HilbertA(tiles=1).plan(((1, table.query_tokens),), 0).tables[0]
    references = {True: _reference(qkv, table, backward), False: _reference(qkv, everything, backward)}
    advance = track(str(case), len(everyone) + 1)
    rows: list[dict[str, Any]] = []
    calls: list[Callable[[], object]] = []
    for peer in everyone:
        row: dict[str, Any] = {"case": str(case), "peer": peer.name, "dense": not peer.sparse}
        try:
            call = _call(peer.prepare(table, device), qkv, backward)
            row["error"] = error = _error(call(), references[peer.sparse])
            if not error <= TOLERANCE[qkv[0].dtype]:  # NaN is wrong too
                raise ValueError(f"wrong by {error:.1e}: not timed")
            row["peak_bytes"] = peak_memory(call, device)
            calls.append(captured(call, device))
        except Exception as error:  # a failing peer must not end the benchmark
            row["failed"] = first_line(error)
        rows.append(row)
        advance()
    timed = [row for row in rows if "failed" not in row]
    for row, taken in zip(timed, time_calls(calls, rounds, device), strict=True):
        row |= {"median_s": median(taken), "fastest_s": min(taken), "slowest_s": max(taken)}
    best = min((row["median_s"] for row in timed if row["dense"]), default=math.nan)
    for row in timed:
        flops = len(qkv[0]) * (everything if row["dense"] else table).flops(*qkv[0].shape[1::2], backward=backward)
        row |= {"speed_up": best / row["median_s"], "tflops": flops / row["median_s"] / 1e12}
        row |= {"flop_bound": 1.0 if row["dense"] else 1 / (1 - table.sparsity())}
    advance()
    return rows


def _call(attention: Attention, qkv: tuple[Tensor, ...], backward: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The output of attention, or the gradients of q, k and v."""
    if not backward:
        return lambda: (attention(*qkv),)
    leaves = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, qkv[0])


def _reference(qkv: tuple[Tensor, ...], table: BlockTable, backward: bool) -> tuple[Tensor, ...]:
    """Reference for `_checked_part`: the portable path in float64, which needs little memory."""
    some = tuple(_checked_part(x).double() for x in qkv)
    scale = some[0].shape[3] ** -0.5
    return _call(lambda q, k, v: portable(q, k, v, table, scale, True)[0], some, backward)()


def _checked_part(x: Tensor) -> Tensor:
    """The part that is compared: the first and the last head of the last sample."""
    return x[-1:, [0, -1]]


def _error(results: tuple[Tensor, ...], references: tuple[Tensor, ...]) -> float:
    """The largest relative error; NaN if either side has a NaN."""
    pairs = zip(results, references, strict=True)
    return torch.stack([(_checked_part(got) - want).norm() / want.norm() for got, want in pairs]).max().item()


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case."""
    table = Table("", "ms", "speed-up", "of bound", "TFLOP/s", "MB", "error")
    for case, rows in groupby(result["rows"], lambda row: row["case"]):
        table.add_row(f"[bold]{case}")
        for row in rows:
            if "failed" in row:
                table.add_row(row["peer"], row["failed"])
                continue
            table.add_row(
                row["peer"], f"{1e3 * row['median_s']:.4g}", f"{row['speed_up']:.2f}x",
                f"{row['speed_up'] / row['flop_bound']:.0%}", f"{row['tflops']:.3g}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['error']:.0e}",
            )  # fmt: skip
        table.add_section()
    return table


def draw_attention(result: dict[str, Any]) -> Figure:
    """A figure of the speed-up of every peer over the best dense attention, with the FLOP bound as a line."""
    rows = [row for row in result["rows"] if "failed" not in row]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    figure = Figure(figsize=(8, 0.6 + 0.2 * len(rows) + 0.15 * len(cases)), layout="constrained")
    axes = figure.add_subplot(xlabel="speed-up over the best dense attention; a line is the FLOP bound")
    axes.spines[["top", "right"]].set_visible(False)
    place, ticks = 0.0, list[float]()
    for case in cases:
        mine = [row for row in rows if row["case"] == case]
        ticks.append(place + (len(mine) - 1) / 2)
        bound = max(row["flop_bound"] for row in mine)
        axes.vlines(bound, place - 0.6, place + len(mine) - 0.4, color=INK, linewidth=1.2)
        for row in mine:
            axes.barh(place, row["speed_up"], height=0.9, color=COLOURS[names.index(row["peer"]) % len(COLOURS)])
            axes.annotate(f"{1e3 * row['median_s']:.3g} ms", (0, place), (4, 0), textcoords="offset points",
                          fontsize=7, verticalalignment="center_baseline")  # fmt: skip
            place += 1
        place += 0.8
    axes.set_yticks(ticks, cases, parse_math=False)
    axes.set_ylim(place - 0.5, -1)  # the first on top
    axes.legend([Patch(color=COLOURS[i % len(COLOURS)]) for i in range(len(names))], names, frameon=False)
    return figure
