# pyright: basic
"""Benchmark of log-linear attention over sequence lengths, checked and timed against its peers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import linear_regression, median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from foveate.apps.bench.table import TableColumn, megabytes, results_table
from foveate.apps.console import Commit, Device, Dtype, Out, numbers, run_and_save
from foveate.ops.hierarchical_pooling import MAX_KERNEL_TOP_K, check_inputs, keys_per_query
from foveate.ops.log_linear_attention import Options, portable
from foveate.utils.device import choose_device, choose_dtype, dtype_name
from foveate.utils.progress import Track, silent
from foveate.utils.timing import MIN_SECONDS, captured, now, peak_memory, time_calls
from lab.bench.attention import TOLERANCE
from lab.bench.common import TIMES, Timed, check_errors, check_time, note_failure, output_or_gradients, time_rows
from lab.bench.peers import LISTED, Listed, dense, versions_with_peers
from lab.bench.reference import Call, key_gradient_error, query_error, selection_error

__all__ = ["INPUTS", "Case", "Settings", "bench_log_linear", "growth", "main", "table_of"]

INPUTS = "balanced", "skewed"
GRADIENTS_UP_TO = 2**16  # tokens; the float64 check of longer sequences takes seconds
GROWS_FROM = 2**16  # tokens; below, launch times and partly idle GPUs hide the growth
ONE_IN = 8  # blocks of which lists of random blocks hold one
CASE_SECONDS = 3.0  # time for the measurements of a case, at least three of each candidate


class Settings(NamedTuple):
    """Settings of the measurement; the options of `main` describe them."""

    device: torch.device
    dtype: torch.dtype
    backward: bool = False
    contiguous: bool = False
    longest: float = 1.0
    rounds: int = 15


class Case(NamedTuple):
    """Shape and options of one call.

    Attributes:
        tokens: Sequence length.
        heads: Number of heads; the batch size is 1.
        head_dim: Channels of a head.
        levels: Number of pooled levels; None for automatic.
        top_k: Number of key blocks that each query block selects.
        block_size: Number of tokens in a block.
        inputs: "balanced" for random inputs; "skewed" if all queries prefer the same `top_k / 2` blocks.
    """

    tokens: int
    heads: int
    head_dim: int
    levels: int | None
    top_k: int
    block_size: int
    inputs: str

    def series(self) -> str:
        """Description of the case without its length."""
        levels = "auto" if self.levels is None else self.levels
        return f"{self.heads} heads of {self.head_dim}, B={self.block_size} K={self.top_k} L={levels}, {self.inputs}"

    def options(self) -> Options:
        """Options of the op.

        Raises:
            ValueError: If the op does not support them.
        """
        if self.inputs not in INPUTS:
            raise ValueError(f"unknown inputs {self.inputs!r}: choose from {', '.join(INPUTS)}")
        like = torch.empty(1, self.heads, self.tokens, self.head_dim, device="meta")
        levels = check_inputs({"q": like}, self.top_k, self.block_size, self.levels)
        return Options(self.top_k, self.block_size, levels, levels, True, self.head_dim**-0.5, False, True)

    def tensors(self, settings: Settings) -> tuple[Tensor, ...]:
        """q, k and v."""
        shape = 1, self.tokens, self.heads, self.head_dim
        q, k, v = (torch.randn(shape, device=settings.device, dtype=settings.dtype).transpose(1, 2) for _ in range(3))
        if self.inputs == "skewed":
            hot = max(1, self.top_k // 2) * self.block_size
            start = self.tokens // 2 // self.block_size * self.block_size
            q += 0.5
            k[:, :, start : start + hot] += 1
        return (q.contiguous(), k.contiguous(), v.contiguous()) if settings.contiguous else (q, k, v)


class Candidate(NamedTuple):
    """An implementation of attention.

    Attributes:
        name: Name in tables.
        options: Options of the op; dense attention has 0 levels.
        attend: Returns the output and the lists of selected blocks.
        graph: Whether to time it as a CUDA graph. The portable path has too many launches for a graph.
        selects: Whether it selects blocks; otherwise its lists are given.
    """

    name: str
    options: Options
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]
    graph: bool = True
    selects: bool = True

    def keys(self, tokens: int) -> int:
        """Number of keys that a query attends to."""
        options = self.options
        return keys_per_query(tokens, options.top_k, options.block_size, options.levels, options.enriched)

    def seconds_at(self, tokens: int, fewer: int, seconds: float) -> float:
        """Predicted seconds of a call, extrapolated from a shorter one."""
        power = 2 if self.options.levels < 2 else 1  # one level scores every pair of blocks
        return seconds * (tokens / fewer) ** power


def candidates(case: Case, settings: Settings) -> list[Candidate]:
    """Implementations that support a case: dense attention, then lists of blocks, the fastest of Foveate last."""
    options, known = case.options(), {"portable": portable}
    if settings.device.type == "cuda" and case.top_k <= MAX_KERNEL_TOP_K:
        from foveate.kernels.log_linear.log_linear_attention import BACKENDS

        call = settings.device, settings.dtype, case.head_dim
        known |= {name: run for name, (supports, run) in BACKENDS.items() if supports(*call)}
    *_, (best, fastest) = known.items()
    one_level = options._replace(levels=1, enriched=0)
    return [
        *(
            Candidate(name, options._replace(levels=0, enriched=0), lambda *qkv, attend=attend: (attend(*qkv), []))
            for name, attend in dense(settings.device, settings.backward).items()
        ),
        *(_given(name, peer, case) for name, peer in LISTED.items() if settings.device.type == "cuda"),
        Candidate(f"top-k of one level, {best}", one_level, _by(fastest, one_level), best != "portable"),
        *(
            Candidate(f"foveate, {name}", options, _by(run, options), name != "portable")
            for name, run in known.items()
        ),
    ]


def _by(run: Callable[..., Any], options: Options) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    return lambda *qkv: run(*qkv, None, None, None, None, options)[::2]


def _given(name: str, peer: Listed, case: Case) -> Candidate:
    """Attention over one in `ONE_IN` blocks, chosen at random for each head: what fine selection has to beat."""
    size = max(peer.sizes)
    blocks = case.tokens // size
    picks = max(1, blocks // ONE_IN)
    options = case.options()._replace(top_k=picks, block_size=size, levels=1, enriched=0)

    @cache  # made before the first call, which is not timed
    def prepared(device: torch.device) -> tuple[Any, list[Tensor]]:
        if case.tokens % size:
            raise ValueError(f"takes whole blocks of {size} tokens, not {case.tokens} tokens")
        lists = torch.rand(1, case.heads, blocks, blocks, device=device).topk(picks).indices.sort().values
        mask = torch.zeros(1, case.heads, blocks, blocks, dtype=torch.bool, device=device).scatter_(3, lists, True)
        return peer.attend(mask, size), [lists.int()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        attention, lists = prepared(q.device)
        return attention(q, k, v), lists

    return Candidate(f"{name}, 1 in {ONE_IN} blocks of {size}", options, attend, selects=False)


def bench_log_linear(cases: Sequence[Case], settings: Settings, track: Track = silent) -> Iterator[dict[str, Any]]:
    """Yield the measurements of all candidates so far after every case, ready for JSON.

    Before timing, three things are compared with float64: outputs and gradients of q for some queries, given the
    selected blocks; the selection itself; and gradients of k and v, up to `GRADIENTS_UP_TO` tokens. A wrong result is
    not timed, and a candidate that cannot run or would take too long is listed with the reason.

    Args:
        cases: Cases to measure, the shorter first in each series, because they predict the times of the longer.
        settings: Settings of the measurement.
        track: Shows progress.
    """
    everyone = [candidates(case, settings) for case in cases]  # raises before anything is timed
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "log-linear attention, " + ("forward and backward" if settings.backward else "forward"),
        "dtype": dtype_name(settings.dtype),
        "layout": "tokens of a head side by side" if settings.contiguous else "heads of a token side by side",
        "gradients_of_keys_checked_up_to_tokens": GRADIENTS_UP_TO if settings.backward else None,
        "rows": rows,
        "growth": {},
        "versions": versions_with_peers(),
    }
    earlier = defaultdict[str, dict[str, tuple[int, float]]](dict)  # tokens and seconds by series and candidate
    for case, some in zip(cases, everyone, strict=True):
        before = earlier[case.series()]
        predicted = {one.name: one.seconds_at(case.tokens, *before.get(one.name, (case.tokens, 0))) for one in some}
        for row in _case(case, some, predicted, settings, track):
            rows.append(row)
            if "call_s" in row:
                before[row["peer"]] = case.tokens, row["call_s"]
        result["growth"] = growth(rows)
        yield result


def _case(
    case: Case, everyone: list[Candidate], predicted: dict[str, float], settings: Settings, track: Track
) -> list[dict[str, Any]]:
    device, backward = settings.device, settings.backward
    inputs = cache(partial(case.tensors, settings))  # made on first use: all candidates may be skipped
    advance = track(f"{case.tokens:,} tokens, {case.series()}", len(everyone) + 1)
    rows: list[dict[str, Any]] = []
    calls: list[Timed] = []
    for one in everyone:
        row = case._asdict() | {"series": case.series(), "levels": everyone[-1].options.levels, "peer": one.name}
        row |= {"dense": not one.options.levels, "keys": one.keys(case.tokens)}
        with note_failure(row):
            check_time(predicted[one.name], settings.longest, "predicted from fewer tokens")
            row |= _checked(one, inputs(), backward)
            call = output_or_gradients(lambda *qkv, attend=one.attend: attend(*qkv)[0], inputs(), backward)
            began = now(device)
            row["peak_bytes"] = peak_memory(call, device)
            row["call_s"] = now(device) - began
            check_time(row["call_s"], settings.longest, "measured")
            calls.append(Timed.of(call, device, graph=one.graph))
        rows.append(row)
        advance()
    rounds = _rounds([row["call_s"] for row in rows if "failed" not in row], settings.rounds)
    timed = time_rows(rows, calls, rounds, device)
    calls.clear()  # frees the memory of their graphs
    for row in timed:
        flops = (14 if backward else 4) * case.tokens * row["keys"] * case.heads * case.head_dim
        row |= {"rounds": rounds, "tflops": flops / row["median_s"] / 1e12}
    if everyone[-1].graph and timed and timed[-1] is rows[-1]:
        rows[-1] |= _stage_seconds(everyone[-1], inputs(), rounds, settings)
    advance()
    return rows


def _rounds(seconds: Sequence[float], most: int) -> int:
    """Number of measurements of each call, given the seconds of all of them."""
    turn = sum(max(MIN_SECONDS, s) for s in seconds) or MIN_SECONDS
    return min(most, max(3, int(CASE_SECONDS / turn)))


def _checked(candidate: Candidate, qkv: tuple[Tensor, ...], backward: bool) -> dict[str, float]:
    """Errors of a call, by name.

    Raises:
        ValueError: If an error is too large.
    """
    leaves = [x.detach().requires_grad_(backward) for x in qkv]
    out, lists = candidate.attend(*leaves)
    grads = torch.autograd.grad(out, leaves, qkv[0]) if backward else ()
    q, k, v = qkv
    call = Call(q, k, v, out.detach(), lists, candidate.options, grads)
    errors = {"error": query_error(call)}
    if candidate.options.levels and candidate.selects:
        errors["selection_error"] = selection_error(call)
    if candidate.options.levels and backward and q.shape[2] <= GRADIENTS_UP_TO:
        errors["key_gradient_error"] = key_gradient_error(call)
    check_errors(errors, TOLERANCE[out.dtype])
    return errors


def _stage_seconds(
    candidate: Candidate, qkv: tuple[Tensor, ...], rounds: int, settings: Settings
) -> dict[str, dict[str, float]]:
    """Median seconds of every stage of the Triton kernels; empty if their graphs need too much memory."""
    calls = stages(qkv, candidate.options, settings.backward)
    try:
        graphs = [captured(call, settings.device) for call in calls.values()]
    except torch.OutOfMemoryError:
        return {"stages_s": {}}
    taken = time_calls(graphs, rounds, settings.device)
    return {"stages_s": {name: median(seconds) for name, seconds in zip(calls, taken, strict=True)}}


def stages(qkv: tuple[Tensor, ...], options: Options, backward: bool) -> dict[str, Callable[[], object]]:
    """Stages of the Triton kernels in order, each as a separate call."""
    from foveate.kernels.launch import empty_like
    from foveate.kernels.log_linear.backward import backward_keys, backward_queries, list_readers
    from foveate.kernels.log_linear.forward import Keys, forward
    from foveate.kernels.log_linear.pooling import pool
    from foveate.kernels.log_linear.select_blocks import pick_nodes

    q, k, v = qkv
    tokens, block, levels = q.shape[2], options.block_size, options.levels
    means, counts, logs = pool([*qkv], None, block, levels)
    pick = partial(pick_nodes, means, counts, tokens, block, levels, options.top_k)
    lists = pick()
    keys = Keys(
        k, v, k[:, :, :0], v[:, :, :0], means, counts, logs, lists, None, block, options.top_k, options.enriched,
        options.reweight, options.exclude_selected, options.full, options.scale,
    )  # fmt: skip
    out = empty_like(q)

    def attend() -> tuple[Tensor, Tensor]:
        return out, forward(q, keys, out, None)

    pooling = partial(pool, [*qkv], None, block, levels)
    calls: dict[str, Callable[[], object]] = {"pooling": pooling, "selection": pick, "attention": attend}
    if not backward:
        return calls
    _, lse = attend()
    queries = partial(backward_queries, q, keys, out, lse, q, None)
    _, *numbers = queries()
    listed = list_readers(keys)
    return calls | {
        "reader lists": partial(list_readers, keys),
        "gradient of q": queries,
        "gradients of k, v": partial(backward_keys, q, keys, *numbers, q, listed),
    }


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Exponent p of time ~ tokens^p of Foveate in each series, from `GROWS_FROM` tokens.

    Fitted by least squares in log-log space; Foveate is the last peer of a case.
    """
    ours = {(row["series"], row["tokens"]): row for row in rows}.values()
    found: dict[str, float] = {}
    for series in dict.fromkeys(row["series"] for row in ours):
        points = [
            (math.log(row["tokens"]), math.log(row["median_s"]))
            for row in ours
            if row["series"] == series and row["tokens"] >= GROWS_FROM and "failed" not in row
        ]
        if len(points) > 1:
            found[series] = linear_regression(*zip(*points, strict=True)).slope
    return found


COLUMNS: list[TableColumn] = [
    ("", "peer", str),
    *TIMES,
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("over", "fastest_dense", str),
    ("keys", "keys", "{:,}".format),
    ("TFLOP/s", "tflops", "{:.3g}".format),
    ("MB", "peak_bytes", megabytes),
    ("error", "error", "{:.0e}".format),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case, with the stages of Foveate."""
    rows: list[dict[str, Any]] = []
    for row in result["rows"]:
        case = {key: row[key] for key in ("series", "tokens")}
        stage_times = row.get("stages_s", {}).items()
        rows += [row, *(case | {"peer": f"  {name}", "median_s": seconds} for name, seconds in stage_times)]
    table = results_table(rows, COLUMNS, lambda row: f"{row['tokens']:,} tokens, {row['series']}")
    table.add_section()
    for series, power in result["growth"].items():
        table.add_row(series, f"time of foveate grows as tokens^{power:.2f} from {GROWS_FROM:,} tokens on")
    return table


def main(
    tokens: Annotated[str, typer.Option(help="Sequence lengths.")] = "4096,16384,65536,262144,1048576",
    heads: Annotated[str, typer.Option(help="Numbers of heads, over the whole batch.")] = "8,64",
    head_dim: Annotated[str, typer.Option(help="Channels of a head.")] = "64",
    levels: Annotated[str, typer.Option(help="Pooled levels: auto, or 1 to 4.")] = "auto",
    top_k: Annotated[str, typer.Option(help="Key blocks that each query block selects.")] = "8",
    block_size: Annotated[int, typer.Option(help="Tokens of a block: 16, 32 or 64.")] = 16,
    inputs: Annotated[
        str, typer.Option(help="balanced: random inputs; skewed: all queries select the same few blocks.")
    ] = "balanced",
    backward: Annotated[bool, typer.Option("--backward", help="Time forward and backward together.")] = False,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Lay inputs out as [heads, tokens]; models have [tokens, heads].")
    ] = False,
    longest: Annotated[float, typer.Option(min=0, help="Longest call in seconds; slower candidates are skipped.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Most measurements of each candidate, interleaved; slow candidates get fewer.")
    ] = 15,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of log-linear attention at growing lengths, against dense attention, one-level top-k and lists.

    python -m lab log-linear                                              # a GPU: about 4 minutes

    python -m lab log-linear --tokens 4096,65536 --heads 8 --backward --inputs balanced,skewed

    python -m lab log-linear --tokens 1024,4096,16384 --heads 2           # a CPU
    """
    where = choose_device(device)
    settings = Settings(where, choose_dtype(dtype, where), backward, contiguous, longest, rounds)
    depths = [None if depth == "auto" else numbers(depth)[0] for depth in levels.split(",")]
    series = product(numbers(heads), numbers(head_dim), depths, numbers(top_k), [block_size], inputs.split(","))
    cases = [Case(length, *options) for options in series for length in sorted(numbers(tokens))]
    path = out / f"log-linear-{'backward' if backward else 'forward'}-{where.type}.json"
    run_and_save(path, commit, partial(bench_log_linear, cases, settings), table_of)
