# pyright: basic
"""One call of log-linear attention over [text | image], as in image models, checked and timed against dense attention.

python -m lab.bench.text_and_image lab/results/log-linear-joint-cuda.json
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from foveate.apps.bench.table import TableColumn, results_table
from foveate.apps.console import Commit, Device, numbers, run_and_save
from foveate.ops import select_blocks
from foveate.ops.joint_attention import LogLinear, joint_attention
from foveate.ops.log_linear_attention import portable, resolved_options
from foveate.utils.device import choose_device, choose_dtype, dtype_name
from foveate.utils.progress import Track, silent
from lab.bench.attention import TOLERANCE
from lab.bench.common import TIMES, Timed, check_errors, note_failure, time_rows
from lab.bench.peers import dense, versions_with_peers

__all__ = ["bench", "error_of", "main"]

STAGES = {"_pool": "pooling", "_select": "selection", "_forward": "image", "forward": "text"}
"""Stages by the name of their kernel."""
COLUMNS: list[TableColumn] = [("", "peer", str), *TIMES, ("speed-up", "speed_up", "{:.2f}x".format)]


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: LogLinear) -> float:
    """Relative error of the output of the first and the last head against float64, given the selected blocks."""
    images = [x[:, :, len(pattern.text) :] for x in (q, k, v)]
    options = resolved_options(*images, **pattern.options)
    sizes = {name: pattern.options[name] for name in ("top_k", "block_size", "levels")}
    lists = select_blocks(*images[:2], **sizes).lists
    some, lists = ([x[:, [0, -1]] for x in xs] for xs in ((out, q, k, v), lists))
    out, q, k, v = (x.double() for x in some)
    (text_q, text_k, text_v), images = zip(*(x.tensor_split([len(pattern.text)], 2) for x in (q, k, v)), strict=True)
    want = portable(*images, text_k, text_v, None, lists, options)[0]
    want = torch.cat([scaled_dot_product_attention(text_q, k, v), want], 2)
    return ((out - want).norm() / want.norm()).item()


def dense_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The same for dense attention, of every 97th query."""
    out, q, k, v = (x[:, [0, -1]].double() for x in (out[:, :, ::97], q[:, :, ::97], k, v))
    want = scaled_dot_product_attention(q, k, v)
    return ((out - want).norm() / want.norm()).item()


def stage_seconds(call: partial[Tensor]) -> dict[str, float]:
    """Seconds of each stage of a call on a GPU."""
    repeats = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            call()
    averages = {event.key: event.device_time_total / 1e6 / repeats for event in profiled.key_averages()}
    return {stage: averages[kernel] for kernel, stage in STAGES.items() if kernel in averages}


def bench(
    patterns: list[tuple[str, LogLinear]], heads: int, head_dim: int, device: torch.device, dtype: torch.dtype,
    rounds: int = 15, track: Track = silent,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the measurements so far after every case, ready for JSON.

    Args:
        patterns: Patterns by name.
        heads: Number of heads; the batch size is 1.
        head_dim: Channels of a head.
        device: Device of the calls.
        dtype: Dtype of queries, keys and values.
        rounds: Measurements of each call, interleaved.
        track: Shows progress.
    """
    rows: list[dict[str, Any]] = []
    advance = track("text and image", len(patterns))
    for case, pattern in patterns:
        torch.manual_seed(0)
        shape = 1, len(pattern.text) + len(pattern.image), heads, head_dim
        q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
        calls = {name: partial(attend, q, k, v) for name, attend in dense(device).items()}
        calls["foveate"] = partial(joint_attention, q, k, v, pattern)
        found, timed = [], []
        for name, call in calls.items():
            row = {"case": case, "tokens": shape[1], "peer": name, "dense": name != "foveate"} | pattern.options
            with note_failure(row):
                out, sparse = call(), name == "foveate"
                row["error"] = error_of(out, q, k, v, pattern) if sparse else dense_error(out, q, k, v)
                check_errors({"error": row["error"]}, TOLERANCE[dtype])
                if sparse:
                    row["stages_s"] = stage_seconds(call) if device.type == "cuda" else {}
                timed.append(Timed.of(call, device))
            found.append(row)
        time_rows(found, timed, rounds, device)
        rows += found
        advance()
        yield {"what": "attention over text and image", "heads": heads, "head_dim": head_dim, "rows": rows,
               "dtype": dtype_name(dtype), "versions": versions_with_peers()}  # fmt: skip


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case."""
    return results_table(result["rows"], COLUMNS, lambda row: row["case"])


def main(
    out: Annotated[Path, typer.Argument(help="JSON file of the result.")],
    pixels: Annotated[str, typer.Option(help="Sides of square images, of 16 pixels for each token.")] = "1024,2048",
    text: Annotated[int, typer.Option(min=0, help="Text tokens.")] = 512,
    keys: Annotated[str, typer.Option(help="Tokens that each query reads one by one.")] = "128,256,512",
    block_size: Annotated[str, typer.Option(help="Tokens of a block: 16, 32 or 64.")] = "16,64",
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 24,
    head_dim: Annotated[int, typer.Option(min=32, max=256, help="Channels of a head.")] = 128,
    device: Device = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of log-linear attention over text and image, against dense attention."""
    where = choose_device(device)
    patterns = list[tuple[str, LogLinear]]()
    for side, count, block in product(numbers(pixels), numbers(keys), numbers(block_size)):
        options = {"top_k": count // block, "block_size": block, "levels": None, "enrich": True}
        case = f"{side} px, top_k={count // block}, block_size={block}"
        patterns.append((case, LogLinear(torch.empty(text), torch.empty((side // 16) ** 2), options)))
    run_and_save(out, commit, partial(bench, patterns, heads, head_dim, where, choose_dtype("auto", where)), table_of)


if __name__ == "__main__":
    typer.run(main)
