# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false
"""Benchmark of block-sparse attention in the shapes of FLUX.1, checked and timed against its peers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from foveate.apps.bench.table import TableColumn, megabytes, results_table
from foveate.apps.console import Commit, Device, Dtype, Out, Rounds, numbers, run_and_save
from foveate.methods import HilbertA
from foveate.ops.block_attention import portable
from foveate.ops.block_table import BlockTable
from foveate.utils.device import choose_device, choose_dtype, dtype_name
from foveate.utils.progress import Track, silent
from foveate.utils.timing import peak_memory
from lab.bench.common import TIMES, Timed, check_errors, note_failure, output_or_gradients, time_rows
from lab.bench.peers import Peer, peers, versions_with_peers

__all__ = ["Case", "bench_attention", "main", "table_of"]

PIXELS = 16  # pixels along each side of a token of FLUX.1
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """Image size and method of a block table to time."""

    pixels: int
    method: HilbertA

    def table(self, text: int) -> BlockTable:
        """Block table of a layer with shifted tiles.

        Raises:
            ValueError: If the side is not a multiple of the token side.
        """
        if self.pixels < PIXELS or self.pixels % PIXELS:
            raise ValueError(
                f"{self.pixels} px do not fit: a token of FLUX.1 is {PIXELS} x {PIXELS} px, use a multiple"
            )
        side = self.pixels // PIXELS
        block = 128 if self.method.align == 128 else 64
        tables = self.method.plan(((side, side),), text, block=block).tables
        return tables[1 % len(tables)]

    def __str__(self) -> str:
        pattern = "dense table" if self.method.tiles == 1 else self.method.title
        return f"{self.pixels} px, {pattern}" + (f" align={self.method.align}" if self.method.align else "")


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
    everyone: Callable[..., list[Peer]] = peers,
    track: Track = silent,
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of all peers so far after every case, ready for JSON.

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
        rounds: Measurements of each peer, interleaved.
        everyone: Returns the peers, given `device`, `dtype`, `head_dim` and `backward`.
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
        "dtype": dtype_name(dtype),
        "rounds": rounds,
        "rows": rows,
        "versions": versions_with_peers(),
    }
    for case, table in zip(cases, tables, strict=True):
        shape = batch, table.query_tokens, heads, head_dim
        q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
        rows += _case(case, table, (q, k, v), everyone(device, dtype, head_dim, backward), backward, rounds, track)
        yield result


def _case(
    case: Case, table: BlockTable, qkv: tuple[Tensor, ...], everyone: list[Peer], backward: bool, rounds: int,
    track: Track,
) -> list[dict[str, Any]]:  # fmt: skip
    device = qkv[0].device
    everything = HilbertA(tiles=1).plan(((1, table.query_tokens),), 0).tables[0]
    references = {True: _reference(qkv, table, backward), False: _reference(qkv, everything, backward)}
    advance = track(str(case), len(everyone) + 1)
    rows: list[dict[str, Any]] = []
    calls: list[Timed] = []
    for peer in everyone:
        row: dict[str, Any] = {"case": str(case), "peer": peer.name, "dense": not peer.sparse}
        with note_failure(row):
            call = output_or_gradients(peer.prepare(table, qkv[0]), qkv, backward)
            row["error"] = _error(call(), references[peer.sparse])
            check_errors({"error": row["error"]}, TOLERANCE[qkv[0].dtype])
            row["peak_bytes"] = peak_memory(call, device)
            calls.append(Timed.of(call, device))
        rows.append(row)
        advance()
    for row in time_rows(rows, calls, rounds, device):
        flops = len(qkv[0]) * (everything if row["dense"] else table).flops(*qkv[0].shape[1::2], backward=backward)
        row["tflops"] = flops / row["median_s"] / 1e12
        row["flop_bound"] = 1.0 if row["dense"] else 1 / (1 - table.sparsity())
        row["of_bound"] = row["speed_up"] and row["speed_up"] / row["flop_bound"]
    advance()
    return rows


def _reference(qkv: tuple[Tensor, ...], table: BlockTable, backward: bool) -> tuple[Tensor, ...]:
    """Reference for `_checked_part`: the portable path in float64, which needs little memory."""
    some = tuple(_checked_part(x).double() for x in qkv)
    scale = some[0].shape[3] ** -0.5
    return output_or_gradients(lambda q, k, v: portable(q, k, v, table, scale, True)[0], some, backward)()


def _checked_part(x: Tensor) -> Tensor:
    """Compared part: the first and the last head of the last sample."""
    return x[-1:, [0, -1]]


def _error(results: tuple[Tensor, ...], references: tuple[Tensor, ...]) -> float:
    """Largest relative error; NaN if either side has a NaN."""
    pairs = zip(results, references, strict=True)
    return torch.stack([(_checked_part(got) - want).norm() / want.norm() for got, want in pairs]).max().item()


COLUMNS: list[TableColumn] = [
    ("", "peer", str),
    *TIMES,
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("over", "fastest_dense", str),
    ("of bound", "of_bound", "{:.0%}".format),
    ("TFLOP/s", "tflops", "{:.3g}".format),
    ("MB", "peak_bytes", megabytes),
    ("error", "error", "{:.0e}".format),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case."""
    return results_table(result["rows"], COLUMNS, lambda row: row["case"])


def main(
    pixels: Annotated[
        str, typer.Option(help="Sides of FLUX.1 images in pixels; a token is 16 x 16.")
    ] = "1024,1536,2048,4096",
    tiles: Annotated[str, typer.Option(help="Numbers of HilbertA tiles; 1 is a dense block table.")] = "1,4,16",
    centre: Annotated[str, typer.Option(help="Sides of HilbertA's central region, as fractions.")] = "0.25,0",
    align: Annotated[
        int | None, typer.Option(help="Tokens of which borders of tiles are multiples: 128 gives whole blocks of 128.")
    ] = None,
    backward: Annotated[bool, typer.Option(help="Time forward and backward together.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 24,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    text: Annotated[int, typer.Option(min=0, help="Number of text tokens; FLUX.1 has 512.")] = 512,
    rounds: Rounds = 15,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of block-sparse attention in FLUX.1's shapes, against its peers.

    python -m lab attention --pixels 1024 --tiles 16                  # a GPU

    python -m lab attention --pixels 2048 --tiles 16 --align 128      # whole blocks of 128 tokens, which FA4 takes

    python -m lab attention --pixels 512 --heads 2 --head-dim 64      # a CPU
    """
    where = choose_device(device)
    cases = [
        Case(side, HilbertA(tiles=count, centre=square, align=align))
        for side in numbers(pixels)
        for count in numbers(tiles)
        for square in (numbers(centre, float) if count > 1 else [0])
    ]
    run = partial(
        bench_attention, cases, where, choose_dtype(dtype, where), batch=batch, heads=heads, head_dim=head_dim,
        text=text, backward=backward, rounds=rounds,
    )  # fmt: skip
    run_and_save(out / f"attention-{'backward' if backward else 'forward'}-{where.type}.json", commit, run, table_of)
