# pyright: basic
"""Benchmark of log-linear attention over sequence lengths, checked and timed beside its peers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from foveate.ops.hierarchical_pooling import MAX_KERNEL_TOP_K, check_inputs, keys_per_query
from foveate.ops.log_linear_attention import Options, portable
from foveate.utils.device import now, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import MIN_SECONDS, captured, first_line, peak_memory, time_calls
from foveate.web.report import INK
from foveate.web.report import TILE_COLOURS as COLOURS
from lab.bench.attention import TOLERANCE
from lab.bench.peers import dense
from lab.bench.reference import Call, key_gradient_error, pick_error, query_error

__all__ = ["INPUTS", "Case", "How", "bench_log_linear", "draw_log_linear", "growth", "table_of"]

INPUTS = "balanced", "skewed"
GRADIENTS_UP_TO = 2**16  # tokens; the check in float64 takes seconds for more
GROWS_FROM = 2**16  # tokens; below, launch times and partly idle GPUs hide the growth
ENOUGH = 3.0  # seconds of measuring a case, after which there are only three rounds


class How(NamedTuple):
    """Settings of the measurement.

    Attributes:
        device: Device to run on.
        dtype: Dtype of q, k and v.
        backward: Time forward and backward together.
        contiguous: Memory layout [heads, tokens] instead of [tokens, heads], which models have.
        longest: Longest call in seconds; slower peers are skipped.
        rounds: Most measurements of each peer; they take turns. Slow cases have fewer, but at least three.
    """

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
        levels: Pooled levels; None for automatic.
        top_k: Blocks that each block of queries selects.
        block_size: Tokens of a block.
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
        return Options(
            self.top_k, self.block_size, levels, levels, True, self.head_dim**-0.5, False, False, True, True
        )

    def tensors(self, how: How) -> tuple[Tensor, ...]:
        """q, k and v."""
        shape = 1, self.tokens, self.heads, self.head_dim
        q, k, v = (torch.randn(shape, device=how.device, dtype=how.dtype).transpose(1, 2) for _ in range(3))
        if self.inputs == "skewed":
            hot = max(1, self.top_k // 2) * self.block_size
            start = self.tokens // 2 // self.block_size * self.block_size
            q += 0.5
            k[:, :, start : start + hot] += 1
        return (q.contiguous(), k.contiguous(), v.contiguous()) if how.contiguous else (q, k, v)


class Contestant(NamedTuple):
    """An implementation of attention.

    Attributes:
        name: Name in tables and plots.
        options: Options of the op; dense attention has no levels.
        attend: Returns the output and the lists of selected blocks.
        graph: Whether to time it as a CUDA graph; not useful with thousands of small launches.
    """

    name: str
    options: Options
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]
    graph: bool = True

    def keys(self, tokens: int) -> int:
        """Number of keys that a query attends to."""
        options = self.options
        return keys_per_query(tokens, options.top_k, options.block_size, options.levels, options.enriched)

    def seconds_at(self, tokens: int, fewer: int, seconds: float) -> float:
        """Predicted seconds of a call, extrapolated from a shorter one."""
        power = 2 if self.options.levels < 2 else 1  # with a single level all blocks are scored against all
        return seconds * (tokens / fewer) ** power


def contestants(case: Case, how: How) -> list[Contestant]:
    """The implementations that support a case: dense attention first, Foveate last."""
    options, known = case.options(), {"portable": portable}
    if how.device.type == "cuda" and case.top_k <= MAX_KERNEL_TOP_K:
        from foveate.kernels.log_linear.log_linear_attention import BACKENDS

        call = how.device, how.dtype, case.head_dim
        known |= {name: run for name, (supports, run) in BACKENDS.items() if supports(*call)}
    *_, (best, fastest) = known.items()
    one_level = options._replace(levels=1, enriched=0)
    return [
        *(
            Contestant(name, options._replace(levels=0, enriched=0), lambda *qkv, attend=attend: (attend(*qkv), []))
            for name, attend in dense(how.device).items()
        ),
        Contestant(f"top-k of one level, {best}", one_level, _by(fastest, one_level), best != "portable"),
        *(
            Contestant(f"foveate, {name}", options, _by(run, options), name != "portable")
            for name, run in known.items()
        ),
    ]


def _by(run: Callable[..., Any], options: Options) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    return lambda *qkv: run(*qkv, None, None, None, None, options)[::2]


# --- check, then time ---


def bench_log_linear(cases: Sequence[Case], how: How, track: Track = silent) -> Iterator[dict[str, Any]]:
    """The measurements of every peer so far, after every case, ready for JSON.

    Before timing, three things are compared with float64: outputs and gradients of q for some queries, given the
    selected blocks; the selection itself; and gradients of k and v, up to `GRADIENTS_UP_TO` tokens. A wrong result is
    not timed, and a peer that cannot run or would take too long is listed with the reason.

    Args:
        cases: Cases to measure, in each series the shorter ones first: they predict the time of the longer ones.
        how: Settings of the measurement.
        track: Shows progress.
    """
    everyone = [contestants(case, how) for case in cases]  # raises before anything is timed
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "log-linear attention, " + ("forward and backward" if how.backward else "forward"),
        "dtype": str(how.dtype).removeprefix("torch."),
        "layout": "tokens of a head side by side" if how.contiguous else "heads of a token side by side",
        "gradients_of_keys_checked_up_to_tokens": GRADIENTS_UP_TO if how.backward else None,
        "rows": rows,
        "growth": {},
        "versions": versions(),
    }
    seconds = defaultdict[str, dict[str, tuple[int, float]]](dict)
    for case, peers in zip(cases, everyone, strict=True):
        before = seconds[case.series()]
        wait = {peer.name: peer.seconds_at(case.tokens, *before.get(peer.name, (case.tokens, 0))) for peer in peers}
        for row in _case(case, peers, wait, how, track):
            rows.append(row)
            if "call_s" in row:
                before[row["peer"]] = case.tokens, row["call_s"]
        result["growth"] = growth(rows)
        yield result


def _case(case: Case, peers: list[Contestant], wait: dict[str, float], how: How, track: Track) -> list[dict[str, Any]]:
    inputs = cache(partial(case.tensors, how))  # made on first use: all peers may be skipped
    advance = track(f"{case.tokens:,} tokens, {case.series()}", len(peers) + 1)
    rows: list[dict[str, Any]] = []
    calls: list[Callable[[], object]] = []
    for peer in peers:
        row = case._asdict() | {"series": case.series(), "levels": peers[-1].options.levels, "peer": peer.name}
        row |= {"dense": not peer.options.levels, "keys": peer.keys(case.tokens)}
        try:
            _in_time(wait[peer.name], how, "predicted from fewer tokens")
            row |= _checked(peer, inputs(), how.backward)
            call = _call(peer, inputs(), how.backward)
            began = now(how.device)
            row["peak_bytes"] = peak_memory(call, how.device)
            row["call_s"] = now(how.device) - began
            _in_time(row["call_s"], how, "measured")
            calls.append(captured(call, how.device) if peer.graph else call)
        except Exception as error:  # a failing peer must not end the benchmark
            row["failed"] = first_line(error)
        rows.append(row)
        advance()
    timed = [row for row in rows if "failed" not in row]
    rounds = _rounds([row["call_s"] for row in timed], how.rounds)
    for row, taken in zip(timed, time_calls(calls, rounds, how.device), strict=True):
        row |= {"rounds": rounds, "median_s": median(taken), "fastest_s": min(taken), "slowest_s": max(taken)}
    calls.clear()  # frees the memory of their graphs
    best = min((row["median_s"] for row in timed if row["dense"]), default=None)
    for row in timed:
        flops = (14 if how.backward else 4) * case.tokens * row["keys"] * case.heads * case.head_dim
        row |= {"tflops": flops / row["median_s"] / 1e12, "speed_up": best and best / row["median_s"]}
    if peers[-1].graph and timed and timed[-1] is rows[-1]:
        rows[-1] |= _split(peers[-1], inputs(), rounds, how)
    advance()
    return rows


def _in_time(seconds: float, how: How, source: str) -> None:
    if seconds > how.longest:
        raise ValueError(f"skipped: about {seconds:.2g} s a call, {source}; more than {how.longest:g} s")


def _rounds(seconds: Sequence[float], most: int) -> int:
    """Number of measurements of each call, given the seconds of all of them."""
    turn = sum(max(MIN_SECONDS, s) for s in seconds) or MIN_SECONDS
    return min(most, max(3, int(ENOUGH / turn)))


def _call(peer: Contestant, qkv: tuple[Tensor, ...], backward: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The output of attention, or the gradients of q, k and v."""
    if not backward:
        return lambda: peer.attend(*qkv)[:1]
    leaves = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(peer.attend(*leaves)[0], leaves, qkv[0])


def _checked(peer: Contestant, qkv: tuple[Tensor, ...], backward: bool) -> dict[str, float]:
    """The errors of a call, by name.

    Raises:
        ValueError: If one is too large.
    """
    leaves = [x.detach().requires_grad_(backward) for x in qkv]
    out, lists = peer.attend(*leaves)
    grads = torch.autograd.grad(out, leaves, qkv[0]) if backward else ()
    q, k, v = qkv
    call = Call(q, k, v, out.detach(), lists, peer.options, grads)
    errors = {"error": query_error(call)}
    if peer.options.levels:
        errors["pick_error"] = pick_error(call)
        if backward and q.shape[2] <= GRADIENTS_UP_TO:
            errors["key_gradient_error"] = key_gradient_error(call)
    for name, error in errors.items():
        if not error <= TOLERANCE[out.dtype]:  # NaN is wrong too
            raise ValueError(f"{name.replace('_', ' ')} {error:.1e}: not timed")
    return errors


# --- parts of the time ---


def _split(peer: Contestant, qkv: tuple[Tensor, ...], rounds: int, how: How) -> dict[str, Any]:
    """Median seconds of every stage of the Triton kernels."""
    try:
        parts = {name: captured(call, how.device) for name, call in stages(qkv, peer.options, how.backward).items()}
    except torch.OutOfMemoryError:
        return {"stages_s": {}}
    taken = time_calls(list(parts.values()), rounds, how.device)
    return {"stages_s": dict(zip(parts, map(median, taken), strict=True))}


def stages(qkv: tuple[Tensor, ...], options: Options, backward: bool) -> dict[str, Callable[[], object]]:
    """The stages of the Triton kernels in order, each as a call of its own."""
    from foveate.kernels.log_linear.backward import backward_keys, backward_queries
    from foveate.kernels.log_linear.forward import Keys, forward
    from foveate.kernels.log_linear.pooling import pool
    from foveate.kernels.log_linear.select_blocks import pick_nodes, readers_of

    q, k, v = qkv
    tokens, block, levels = q.shape[2], options.block_size, options.levels
    means, counts, logs = pool([*qkv], None, block, levels)
    pick = partial(pick_nodes, means, counts, tokens, block, levels, options.top_k)
    lists = pick()
    keys = Keys(
        k, v, k[:, :, :0], v[:, :, :0], means, counts, logs, lists, None, block, options.top_k, options.enriched,
        options.reweight, options.exclude_selected, options.full, options.scale,
    )  # fmt: skip
    attend = partial(forward, q, keys)
    calls = {"pooling": partial(pool, [*qkv], None, block, levels), "picking": pick, "attention": attend}
    if not backward:
        return calls
    out, lse = attend()
    queries = partial(backward_queries, q, keys, out, lse, q, torch.zeros_like(lse))
    _, *numbers = queries()
    readers = readers_of(lists)
    return calls | {
        "lists of readers": partial(readers_of, lists),
        "gradient of q": queries,
        "gradients of k, v": partial(backward_keys, q, keys, *numbers, q, readers),
    }


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The exponent p of time ~ tokens^p of Foveate in each series, from `GROWS_FROM` tokens on.

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


# --- show ---


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by case, with the stages of Foveate."""
    table = Table("", "ms", "speed-up", "keys", "TFLOP/s", "MB", "error")
    for (series, tokens), rows in groupby(result["rows"], lambda row: (row["series"], row["tokens"])):
        table.add_row(f"[bold]{tokens:,} tokens, {series}")
        for row in rows:
            if "failed" in row:
                table.add_row(row["peer"], row["failed"])
                continue
            table.add_row(
                row["peer"], f"{1e3 * row['median_s']:.4g}",
                "" if row["speed_up"] is None else f"{row['speed_up']:.2f}x", f"{row['keys']:,}",
                f"{row['tflops']:.3g}", "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
                f"{row['error']:.0e}",
            )  # fmt: skip
            for name, seconds in row.get("stages_s", {}).items():
                table.add_row(f"  {name}", f"{1e3 * seconds:.4g}")
        table.add_section()
    for series, power in result["growth"].items():
        table.add_row(series, f"time of foveate grows as tokens^{power:.2f} from {GROWS_FROM:,} tokens on")
    return table


def draw_log_linear(result: dict[str, Any]) -> Figure:
    """A figure of time over tokens for each series, a line for each peer, with guides for N and N^2."""
    rows = [row for row in result["rows"] if "failed" not in row]
    names, series = (list(dict.fromkeys(row[key] for row in rows)) for key in ("peer", "series"))
    figure = Figure(figsize=(6.4, 0.4 + 3.6 * max(1, len(series))), layout="constrained")
    for axes, title in zip(figure.subplots(max(1, len(series)), squeeze=False)[:, 0], series, strict=False):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axes.set_title(title, fontsize=9, parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        mine = [row for row in rows if row["series"] == title]
        sizes = sorted({row["tokens"] for row in mine})
        _guides(axes, mine, sizes)
        for name in dict.fromkeys(row["peer"] for row in mine):
            points = [(row["tokens"], 1e3 * row["median_s"]) for row in mine if row["peer"] == name]
            colour = COLOURS[names.index(name) % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7)
    return figure


def _guides(axes: Any, rows: list[dict[str, Any]], sizes: list[int]) -> None:
    """Draw lines of N and N^2 from the first point of the fastest peer."""
    start = 1e3 * min(row["median_s"] for row in rows if row["tokens"] == sizes[0])
    top = max(1e3 * row["median_s"] for row in rows)
    for power, name in ((1, "N"), (2, "N²")):
        last = min(sizes[-1], sizes[0] * (top / start) ** (1 / power))
        times = [start, start * (last / sizes[0]) ** power]
        axes.plot([sizes[0], last], times, linestyle=(0, (2, 3)), color=INK, linewidth=0.8)
        axes.annotate(name, (last, times[1]), (3, 0), textcoords="offset points", fontsize=7, color=INK)
