# pyright: basic, reportPrivateImportUsage=false
"""Time to the first token after a long context: full prefill, and cached chunks with some rows recomputed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.apps.bench.context import Question, QuestionWorkload, Work, about, check, check_lengths, find_encoder
from foveate.apps.bench.table import TableColumn, milliseconds, results_table
from foveate.apps.console import Commit, Device, Dtype, Out, Rounds, numbers, run_and_save
from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, NoRecompute
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers.context import patch_batch
from foveate.utils.device import choose_device, choose_dtype, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import Stopwatch, peak_memory, time_calls

__all__ = ["Settings", "bench_context", "main", "table_of"]

STAGES = "encode", "compose", "score", "recompute", "logits"


class Settings(NamedTuple):
    """Settings of the benchmark; the options of `main` describe them."""

    model: str
    device: torch.device
    dtype: torch.dtype
    workload: QuestionWorkload = QuestionWorkload()
    rounds: int = 5


class Variant(NamedTuple):
    """One way to compute the first token.

    Attributes:
        name: Name in tables.
        method: Policy that chooses the rows. None is a full prefill by the model alone.
        cached: Whether the chunks are in memory, or encoded first.
        attention: Context manager that selects the attention of a full prefill.
    """

    name: str
    method: RecomputePolicy | None
    cached: bool = True
    attention: Callable[[], Any] = nullcontext


@torch.no_grad()
def bench_context(tokens: Sequence[int], settings: Settings, track: Track = silent) -> Iterator[dict[str, Any]]:
    """Yield the times to the first token so far after each length of the context, ready for JSON.

    Before timing, a small model with large random weights checks in the same dtype that recomputing all rows gives the
    logits of the full prefill, and that the stale context does not. The timed model is checked at each length.

    Weights are random, so that only times are meaningful. Variants with `cached` use chunks in memory; the others
    encode them first. Peak memory excludes the weights and the chunks.

    Args:
        tokens: Lengths of the context, prefix included.
        settings: Settings of the benchmark.
        track: Shows progress.

    Raises:
        ValueError: If the model is unknown or too large for the device, a length is shorter than two chunks, or a
            check fails.
    """
    workload = settings.workload
    check_lengths(tokens, workload.chunk)
    encoder = find_encoder(settings.model, settings.device, settings.dtype)
    checked = check(settings.device, settings.dtype)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "time to the first token, timing only: random weights",
        **about(settings.model, encoder),
        "chunk": workload.chunk,
        "prompt": workload.prompt,
        "recompute": workload.recompute,
        "rounds": settings.rounds,
        "small_model": checked,
        "rows": rows,
        "versions": versions(),
    }
    for length in tokens:
        rows += _timed(Work(encoder, length, workload), settings, track)
        yield result


def variants(settings: Settings) -> list[Variant]:
    """Variants to time, full prefills first."""
    full = [Variant("full prefill", None)]
    if settings.device.type == "cuda":
        flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        for name, backends in (("cuDNN", [cudnn, flash]), ("FA2", [flash])):  # flash where cuDNN has no kernel
            attention = partial(sdpa_kernel, backends, set_priority=True)
            full.append(Variant(f"full prefill, {name}", None, attention=attention))
    part = f"{settings.workload.recompute:.0%}"
    ours = InfoFlowKV(recompute=settings.workload.recompute)
    return [
        *full,
        Variant("no recompute", NoRecompute()),
        Variant(f"InfoFlow {part}", ours),
        Variant(f"CacheBlend {part}", CacheBlend(recompute=settings.workload.recompute)),
        Variant(f"EPIC {part}", EPIC(recompute=settings.workload.recompute)),
        Variant(f"InfoFlow {part}, encoded on the fly", ours, cached=False),
    ]


def first_token(
    variant: Variant, work: Work, question: Question, watch: Stopwatch | None = None
) -> tuple[Tensor, int]:
    """Logits of the first token, and the number of recomputed rows. `watch` times the `STAGES`."""
    watch = watch or Stopwatch(work.encoder.device)
    if variant.method is None:
        ids = work.ids(question)[None]
        with watch.step("logits"), variant.attention():
            return work.encoder.model(input_ids=ids, logits_to_keep=1).logits[0], 0
    chunks = [work.chunks[i] for i in question.order]
    if not variant.cached:
        documents = [chunk.ids.tolist() for chunk in chunks]
        with watch.step("encode"):
            chunks = work.encoder.encode(documents)
    with watch.step("compose"):
        context = work.encoder.compose(chunks)
    patched = patch_batch([context], [question.prompt], [variant.method], watch=watch)
    with watch.step("logits"):
        logits = patched.logits(last=1)[0]
    patched.close()
    return logits, len(patched.rows[0])


def _timed(work: Work, settings: Settings, track: Track) -> list[dict[str, Any]]:
    timed = variants(settings)
    (question,) = work.draw(1, 0)
    advance = track(f"{work.tokens:,} tokens", len(timed) * (settings.rounds + 1) + 1)
    error = work.check()
    advance()
    rows: list[dict[str, Any]] = []
    for variant in timed:
        peak = peak_memory(partial(first_token, variant, work, question), settings.device)
        cached, count = variant.cached and variant.method is not None, first_token(variant, work, question)[1]
        rows.append({"tokens": work.tokens, "variant": variant.name, "cached": cached, "rows": count,
                     "all_recomputed_error": error, "peak_bytes": peak})  # fmt: skip
        advance()
    copied = _copy_seconds(work, settings)
    taken: list[list[dict[str, float]]] = [[] for _ in timed]
    for _ in range(settings.rounds):
        for variant, times in zip(timed, taken, strict=True):
            watch = Stopwatch(settings.device)
            first_token(variant, work, question, watch)
            times.append(watch.seconds)
            advance()
    for row, times in zip(rows, taken, strict=True):
        totals = [sum(parts.values()) for parts in times]
        row |= {"first_token_s": median(totals), "fastest_s": min(totals), "slowest_s": max(totals)}
        row |= {f"{stage}_s": median(parts[stage] for parts in times) for stage in STAGES if stage in times[0]}
        row["score_share"] = row.get("score_s", 0.0) / row["first_token_s"]
        if "compose_s" in row:
            row["compose_speed"] = copied / row["compose_s"]
    full_prefill = timed[0]
    full = [row for row, variant in zip(rows, timed, strict=True) if variant.method is None]
    best = min(row["first_token_s"] for row in full)
    for row, variant in zip(rows, timed, strict=True):
        row["speed_up"] = best / row["first_token_s"]
        row["flop_bound"] = _flops(work, full_prefill, 0) / _flops(work, variant, row["rows"])
    return rows


def _copy_seconds(work: Work, settings: Settings) -> float:
    """Time to copy the keys and values of all chunks once, the lower bound for composition."""
    states = [torch.stack([chunk.keys, chunk.values]) for chunk in work.chunks]
    copies = [torch.empty_like(state) for state in states]
    return median(time_calls([partial(torch._foreach_copy_, copies, states)], settings.rounds, settings.device)[0])


def _flops(work: Work, variant: Variant, rows: int) -> float:
    """Floating-point operations of matrix products, for recomputed rows spread evenly over the context."""
    config, model = work.encoder.model.config, work.encoder.model.model
    linear = 2 * sum(weight.numel() for weight in model.layers.parameters()) / config.num_hidden_layers
    pair = 4 * config.num_attention_heads * model.layers[0].self_attn.head_dim
    prompt, context = work.asked.prompt, work.tokens
    tokens = context + prompt

    def layer(queries: int, keys: float) -> float:
        return queries * (linear + pair * keys)

    if variant.method is None:
        return config.num_hidden_layers * layer(tokens, tokens / 2)
    read = layer(prompt, context + prompt / 2)
    total = config.num_hidden_layers * (layer(rows, context / 2) + read)
    if isinstance(variant.method, InfoFlowKV):
        total += (max(variant.method.layers(config.num_hidden_layers)) + 1) * read
    if isinstance(variant.method, CacheBlend):
        total += layer(context, context / 2)  # all of layer 0; only keys and values of layer 1
    if not variant.cached:
        total += config.num_hidden_layers * sum(layer(len(chunk.ids), len(chunk.ids) / 2) for chunk in work.chunks)
    return total


COLUMNS: list[TableColumn] = [
    ("", "variant", str),
    ("rows", "rows", "{:,}".format),
    ("ms", "first_token_s", milliseconds),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("FLOP bound", "flop_bound", "{:.2f}x".format),
    *((stage, f"{stage}_s", lambda seconds: f"{1e3 * seconds:.3g}") for stage in STAGES),
    ("score's share", "score_share", "{:.1%}".format),
    ("composing / copying", "compose_speed", "{:.0%}".format),
    ("GB", "peak_bytes", lambda count: f"{count / 1e9:.2f}"),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by length."""
    return results_table(result["rows"], COLUMNS, lambda row: f"{row['tokens']:,} tokens")


def main(
    tokens: Annotated[str, typer.Option(help="Lengths of the context.")] = "8192,16384,32768,65536",
    model: Annotated[
        str, typer.Option(help="Size, with random weights: llama-8b (Llama-3.1-8B) or small (7 M parameters).")
    ] = "llama-8b",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 2048,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 64,
    recompute: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the tokens to recompute.")] = 0.15,
    rounds: Rounds = 5,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time the first token after a long context: full prefill against cached chunks with some tokens recomputed.

    The weights are random, so this measures time only. Chunks are in memory; one row of the table encodes them first.

    python -m lab context                                                     # a GPU with 60 GB or more

    python -m lab context --model small --tokens 2048 --chunk 512             # a CPU
    """
    where = choose_device(device)
    settings = Settings(
        model, where, choose_dtype(dtype, where), QuestionWorkload(chunk, prompt, recompute=recompute), rounds
    )
    path = out / f"context-{model}-{where.type}.json"
    run_and_save(path, commit, partial(bench_context, numbers(tokens), settings), table_of)
