# pyright: basic, reportPrivateImportUsage=false
"""The time to the first token behind a long context: full prefill, and cached chunks with some rows computed again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.table import Column, Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from foveate.bench.models import random_model
from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkCache, ChunkEncoder, Patched
from foveate.transformers.context import Asked
from foveate.utils.device import Stopwatch, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import Marks, peak_memory
from foveate.web.report import TILE_COLOURS as COLOURS

__all__ = ["MODELS", "How", "bench_context", "draw_context", "table_of"]

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
SMALL = LLAMA_8B | {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}  # fmt: skip
MODELS = {"llama-8b": LLAMA_8B, "small": SMALL}
"""By name: the shape of Llama-3.1-8B, and that of the model that is checked: heads of one size, attention far from
even."""
CHECKED = 2000, 2000, 2100  # tokens of chunks: enough rows for every kernel
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
STAGES = "encode", "compose", "score", "recompute", "prompt"


class How(NamedTuple):
    """What is timed.

    Attributes:
        model: One of `MODELS`.
        device: Where.
        dtype: Of weights and caches.
        chunk: Tokens of a chunk.
        prompt: Tokens of the prompt.
        recompute: Fraction of rows.
        rounds: How often each is timed; all take turns.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    chunk: int = 2048
    prompt: int = 64
    recompute: float = 0.15
    rounds: int = 5


class MethodLike(NamedTuple):
    """One way to the first token.

    Attributes:
        name: In tables and plots.
        method: What chooses the rows; None is a full prefill by the model alone.
        cached: Whether the chunks are there, or are encoded first.
        attention: Context in which the model prefills.
    """

    name: str
    method: RecomputePolicy | None
    cached: bool = True
    attention: Callable[[], Any] = nullcontext


class Work(NamedTuple):
    """A context to answer from."""

    encoder: ChunkEncoder
    documents: list[list[int]]
    chunks: list[ChunkCache]
    ids: Tensor
    prompt: list[int]

    @classmethod
    def of(cls, encoder: ChunkEncoder, lengths: Sequence[int], prompt: int) -> "Work":
        """Random tokens behind the encoder's prefix."""
        config, draw = encoder.model.config, torch.Generator().manual_seed(0)
        ids = torch.randint(1, config.vocab_size, (sum(lengths) + prompt,), generator=draw)
        *documents, question = ids.split([*lengths, prompt])
        texts = [document.tolist() for document in documents]
        whole = torch.cat([encoder.prefix, ids.to(encoder.device)])
        return cls(encoder, texts, encoder.encode(texts), whole, question.tolist())


@torch.no_grad()
def bench_context(tokens: Sequence[int], how: How, track: Track = silent) -> Iterator[dict[str, Any]]:
    """After every length the times so far to the first token behind a context, ready for JSON.

    First a small model with large random weights answers in the same dtype from a context that was computed again
    throughout: the answer must be that of its full prefill, and that from the stale context must not. At each length
    the same is asked of the model that is timed.

    The model has random weights, so nothing is said about answers. Rows with `cached` take chunks that lie in memory;
    the others encode them first. Peak memory is beyond the weights and the chunks.

    Args:
        tokens: Lengths of the context, prefix included.
        how: What is timed.
        track: Shows progress.

    Raises:
        ValueError: If there is no such model or it is too large for the device, a length is shorter than two chunks,
            or a check fails.
    """
    if how.model not in MODELS:
        raise ValueError(f"unknown model {how.model!r}: choose one of {', '.join(MODELS)}")
    if how.model == "llama-8b" and how.device.type == "cpu":
        raise ValueError("llama-8b has 8 billion parameters, too many for a CPU: use --model small, or a GPU")
    if short := [length for length in tokens if length < 2 * how.chunk]:
        raise ValueError(
            f"a context of {short[0]} tokens has not two chunks of {how.chunk}: use --chunk {short[0] // 2}"
        )
    checked = _check(how)
    encoder = _encoder(MODELS[how.model], how)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "time to the first token, timing only: random weights",
        "model": how.model,
        "parameters": sum(p.numel() for p in encoder.model.parameters()),
        "chunk": how.chunk,
        "prompt": how.prompt,
        "recompute": how.recompute,
        "device": how.device.type,
        "dtype": str(how.dtype).removeprefix("torch."),
        "rounds": how.rounds,
        "small_model": checked,
        "rows": rows,
        "versions": versions(),
    }
    for length in tokens:
        whole, rest = divmod(length - len(encoder.prefix), how.chunk)
        work = Work.of(encoder, [how.chunk] * whole + [rest] * (rest > 0), how.prompt)
        rows += _timed(work, length, how, track)
        yield result


def ways(how: How) -> list[MethodLike]:
    """What is timed: full prefills first."""
    full = [MethodLike("full prefill", None)]
    if how.device.type == "cuda":
        flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION  # flash takes what cuDNN does not
        for name, backends in (
            ("cuDNN", [cudnn, flash]),
            ("FA2", [flash]),
        ):
            attention = partial(sdpa_kernel, backends, set_priority=True)
            full.append(MethodLike(f"full prefill, {name}", None, attention=attention))
    part = f"{how.recompute:.0%}"
    ours = InfoFlowKV(recompute=how.recompute)
    return [
        *full,
        MethodLike("no recompute", NoRecompute()),
        MethodLike(f"InfoFlow {part}", ours),
        MethodLike(f"CacheBlend {part}", CacheBlend(recompute=how.recompute)),
        MethodLike(f"EPIC {part}", EPIC(recompute=how.recompute)),
        MethodLike(f"InfoFlow {part}, encoded on the fly", ours, cached=False),
    ]


def first_token(way: MethodLike, work: Work, mark: Callable[[str], None] = lambda stage: None) -> tuple[Tensor, int]:
    """The logits of the first token, and how many rows were computed again."""
    if way.method is None:
        with way.attention():
            logits = work.encoder.model(input_ids=work.ids[None], logits_to_keep=1).logits[0]
        mark("prompt")
        return logits, 0
    chunks = work.chunks
    if not way.cached:
        chunks = work.encoder.encode(work.documents)
        mark("encode")
    context = work.encoder.compose(chunks)
    mark("compose")
    rows = way.method.rows(Asked(context, work.prompt)).cpu()
    mark("score")
    context.recompute(rows)
    mark("recompute")
    order = tuple(range(len(chunks)))
    patched = Patched(context, work.ids[-len(work.prompt) :], order, rows, Stopwatch(work.encoder.device))
    logits = patched.logits(last=1)
    mark("prompt")
    return logits, len(rows)


def _encoder(shape: dict[str, Any], how: How) -> ChunkEncoder:
    torch.manual_seed(0)
    model = random_model(lambda: LlamaForCausalLM(LlamaConfig(**shape)), how.device, how.dtype)
    nobody: Any = SimpleNamespace(bos_token_id=0, get_vocab=dict, special_tokens_map={})  # all is token ids
    return ChunkEncoder(model, nobody)


def _check(how: How) -> dict[str, float]:
    """The small model's errors, everything recomputed and nothing."""
    work = Work.of(_encoder(SMALL, how), CHECKED, how.prompt)
    errors = {"all_recomputed_error": _error(work, FullPrefill()), "stale_error": _error(work, NoRecompute())}
    if not errors["all_recomputed_error"] <= TOLERANCE[how.dtype] < errors["stale_error"]:  # NaN is wrong too
        raise ValueError(f"everything recomputed is not the full prefill of a small model, {errors}: not timing it")
    return errors


def _error(work: Work, method: RecomputePolicy) -> float:
    """Relative difference to the full prefill."""
    full, ours = (first_token(MethodLike("", kind), work)[0].float() for kind in (None, method))
    return ((ours - full).norm() / full.norm()).item()


def _timed(work: Work, length: int, how: How, track: Track) -> list[dict[str, Any]]:
    everyone = ways(how)
    advance = track(f"{length:,} tokens", len(everyone) * (how.rounds + 1) + 1)
    error = _error(work, FullPrefill())
    if not error <= TOLERANCE[how.dtype]:
        raise ValueError(f"everything recomputed differs from the full prefill by {error:.1e} at {length} tokens")
    advance()
    rows: list[dict[str, Any]] = []
    for way in everyone:
        peak, computed = peak_memory(partial(first_token, way, work), how.device), first_token(way, work)[1]
        rows.append({"tokens": length, "variant": way.name, "cached": way.cached and way.method is not None,
                     "rows": computed, "all_recomputed_error": error, "peak_bytes": peak})  # fmt: skip
        advance()
    taken: list[list[dict[str, float]]] = [[] for _ in everyone]
    for _ in range(how.rounds):
        for way, times in zip(everyone, taken, strict=True):
            marks = Marks(how.device)
            first_token(way, work, marks)
            times.append(marks.seconds())
            advance()
    for row, times in zip(rows, taken, strict=True):
        totals = [sum(parts.values()) for parts in times]
        row |= {"first_token_s": median(totals), "fastest_s": min(totals), "slowest_s": max(totals)}
        row |= {f"{stage}_s": median(parts[stage] for parts in times) for stage in STAGES if stage in times[0]}
        row["score_share"] = row.get("score_s", 0.0) / row["first_token_s"]
    full = [row for row, way in zip(rows, everyone, strict=True) if way.method is None]
    best = min(row["first_token_s"] for row in full)
    for row, way in zip(rows, everyone, strict=True):
        row["speed_up"] = best / row["first_token_s"]
        row["flop_bound"] = _flops(work, None, 0) / _flops(work, way, row["rows"])
    return rows


def _flops(work: Work, way: MethodLike | None, rows: int) -> float:
    """Of products alone. Rows that are computed again lie evenly, or, all of them, one behind the other."""
    config, model = work.encoder.model.config, work.encoder.model.model
    linear = 2 * sum(weight.numel() for weight in model.layers.parameters()) / config.num_hidden_layers
    pair = 4 * config.num_attention_heads * model.layers[0].self_attn.head_dim
    prompt, tokens = len(work.prompt), len(work.ids)
    context = tokens - prompt

    def layer(some: int, behind: float) -> float:
        return some * (linear + pair * behind)

    if way is None or way.method is None:
        return config.num_hidden_layers * layer(tokens, tokens / 2)
    read = layer(prompt, context + prompt / 2)
    total = config.num_hidden_layers * (layer(rows, context / 2) + read)
    if isinstance(way.method, InfoFlowKV):
        total += (max(way.method.layers(config.num_hidden_layers)) + 1) * read
    if isinstance(way.method, CacheBlend):
        total += layer(context, context / 2)  # layer 0 whole; of layer 1 keys and values alone
    if not way.cached:
        total += config.num_hidden_layers * sum(layer(len(ids), len(ids) / 2) for ids in work.documents)
    return total


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("", "variant", str),
    ("rows", "rows", "{:,}".format),
    ("ms", "first_token_s", lambda seconds: f"{1e3 * seconds:.4g}"),
    ("speed-up", "speed_up", "{:.2f}x".format),
    ("FLOP bound", "flop_bound", "{:.2f}x".format),
    *((stage, f"{stage}_s", lambda seconds: f"{1e3 * seconds:.3g}") for stage in STAGES),
    ("its share", "score_share", "{:.1%}".format),
    ("GB", "peak_bytes", lambda count: f"{count / 1e9:.2f}"),
]


def table_of(result: dict[str, Any]) -> Table:
    """The measurements, to print: the columns that there are numbers for."""
    shown = [column for column in COLUMNS if any(row.get(column[1]) for row in result["rows"])]
    table = Table(*(Column(title, overflow="fold") for title, _, _ in shown))
    for length, rows in groupby(result["rows"], lambda row: row["tokens"]):
        table.add_row(f"[bold]{length:,} tokens")
        for row in rows:
            table.add_row(*(show(row[field]) if row.get(field) else "" for _, field, show in shown))
        table.add_section()
    return table


def draw_context(result: dict[str, Any]) -> Figure:
    """For each length a bar of every variant, cut into its stages."""
    lengths = list(dict.fromkeys(row["tokens"] for row in result["rows"]))
    variants = len(result["rows"]) // len(lengths)
    figure = Figure(figsize=(9, (0.8 + 0.28 * variants) * len(lengths)), layout="constrained")
    for index, length in enumerate(lengths):
        axes = figure.add_subplot(len(lengths), 1, index + 1, title=f"{length:,} tokens", xlabel="ms")
        axes.spines[["top", "right"]].set_visible(False)
        mine = [row for row in result["rows"] if row["tokens"] == length]
        for place, row in enumerate(mine):
            left = 0.0
            for stage, colour in zip(STAGES, COLOURS, strict=False):
                width = 1e3 * row.get(f"{stage}_s", 0.0)
                axes.barh(place, width, left=left, color=colour, label="" if index or place else stage)
                left += width
            axes.annotate(f"{row['speed_up']:.2f}x", (left, place), (4, 0), textcoords="offset points", fontsize=7,
                          verticalalignment="center_baseline")  # fmt: skip
        axes.set_yticks(range(len(mine)), [row["variant"] for row in mine], parse_math=False)
        axes.invert_yaxis()
    figure.axes[0].legend(frameon=False, ncols=len(STAGES), fontsize=8, loc="lower right")
    return figure
