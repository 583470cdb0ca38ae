# pyright: basic, reportPrivateImportUsage=false
"""One denoising step of a Flux, dense, with HilbertA, with ToMA and with both: check, then time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from foveate.bench.timing import captured, peak_memory, time_calls
from foveate.compare import Track, versions
from foveate.demo.untrained import untrained_pipeline
from foveate.integrations.diffusers.apply import apply
from foveate.integrations.diffusers.lora import Way, using
from foveate.integrations.diffusers.pipelines import Call, choose_device, choose_dtype, now, ready, time_steps
from foveate.methods import HilbertA, Together, ToMA
from foveate.ops.block_attention import block_attention

__all__ = ["bench_step", "table_of"]

ATTENTION = None, HilbertA(tiles=1), HilbertA(tiles=4), HilbertA(tiles=16)
MERGING = ToMA(keep=0.5), ToMA(keep=0.25), Together((HilbertA(tiles=16), ToMA(keep=0.5)))
PLUMBING = HilbertA(tiles=1), ToMA(keep=0.999, weights="hard", skip=0)  # must be dense: every token is kept
CYCLE = 10  # steps after which ToMA's schedule comes round
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def bench_step(
    sides: Sequence[int],
    *,
    full_size: bool = False,
    text: int = 512,
    compile: bool = False,
    rounds: int = 9,
    device: str = "auto",
    dtype: str = "auto",
    track: Track = lambda name, length: lambda: None,
) -> Iterator[dict[str, Any]]:
    """After every size the times so far of one forward of a Flux with random weights, ready for JSON.

    The reorder of the tokens is part of a forward. Variants of sparse attention take turns. Those that merge tokens
    come after them, one by one, through whole cycles of their schedule; their time is the mean over those steps,
    plans included.

    Args:
        sides: Image tokens along each side.
        full_size: FLUX.1-dev's 12 B parameters, not the built-in model's 17 M.
        text: Text tokens.
        compile: Compile the repeated blocks.
        rounds: How often each variant is timed; they take turns.
        device: See `choose_device`.
        dtype: See `choose_dtype`.
        track: Shows progress.

    Raises:
        ValueError: If one tile, or merging that keeps every token, does not give the dense step.
    """
    where = choose_device(device)
    pipe = _full_size(where, choose_dtype(dtype, where)) if full_size else ready(untrained_pipeline(), device, dtype)
    if compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "one forward of a Flux transformer with random weights",
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
        "text_tokens": text,
        "device": where.type,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "compiled": compile,
        "rounds": rounds,
        "rows": rows,
        "versions": versions(),
    }
    for side in sides:
        rows += _rows(pipe, side, text, rounds, track)
        yield result


def _rows(pipe: Any, side: int, text: int, rounds: int, track: Track) -> list[dict[str, Any]]:
    step = _random_step(pipe.transformer, side, text)
    errors = [_difference(pipe, step, method) for method in PLUMBING]
    for method, error in zip(PLUMBING, errors, strict=True):
        if not error <= TOLERANCE[pipe.dtype]:  # NaN is wrong too
            raise ValueError(
                f"{method.title} differs from dense by {error:.1e} at {side} x {side} tokens: not timing a wrong step"
            )
    peaks: list[int | None] = []
    for method in ATTENTION:
        with using(pipe, method):
            peaks.append(peak_memory(lambda: pipe.transformer(**step), pipe.device))
    advance = track(f"{side} x {side} tokens", len(ATTENTION) * (rounds + 1))
    seconds = list(zip(*time_steps(pipe, Call((), step), ATTENTION, rounds, advance), strict=True))
    attention = _attention_seconds(pipe.transformer, side, text, rounds)
    layers = len(pipe.transformer.transformer_blocks) + len(pipe.transformer.single_transformer_blocks)
    dense = median(seconds[0])
    rows = [
        _row(method, side, median(taken), taken, dense, peak)
        | {
            "attention_share": layers * alone / median(taken),
            "attention_speed_up": attention[0] / alone,
            "attention_flop_bound": 1 / (1 - mean(table.sparsity() for table in _tables(method, side, text))),
            "one_tile_error": errors[0],
        }
        for method, taken, alone, peak in zip(ATTENTION, seconds, attention, peaks, strict=True)
    ]
    for method in MERGING:
        advance = track(method.title, -(-rounds // CYCLE) * CYCLE)
        taken, peak = _scheduled(pipe, step, method, -(-rounds // CYCLE) * CYCLE, advance)
        rows.append(_row(method, side, mean(taken), taken, dense, peak) | {"all_kept_error": errors[1]})
    return rows


def _row(
    method: Way | None, side: int, seconds: float, taken: Sequence[float], dense: float, peak: int | None
) -> dict[str, Any]:
    return {
        "image_tokens": side * side,
        "variant": method.title if method else "dense",
        "step_s": seconds,
        "median_s": median(taken),
        "fastest_s": min(taken),
        "slowest_s": max(taken),
        "speed_up": dense / seconds,
        "peak_bytes": peak,
    }


def _scheduled(
    pipe: Any, step: dict[str, Any], method: Way, steps: int, advance: Callable[[], None]
) -> tuple[list[float], int | None]:
    """Seconds of each forward of a run, in which plans are made when their time comes; and the peak of memory."""
    with using(pipe, method):
        for number in (0, 1):  # compile what makes a plan and what uses one
            pipe.scheduler.set_begin_index(number)
            pipe.transformer(**step)
        pipe.scheduler.set_begin_index(0)
        peak = peak_memory(lambda: pipe.transformer(**step), pipe.device)
        taken: list[float] = []
        for number in range(1, steps + 1):
            pipe.scheduler.set_begin_index(number)
            began = now(pipe.device)
            pipe.transformer(**step)
            taken.append(now(pipe.device) - began)
            advance()
    pipe.scheduler.set_begin_index(0)
    return taken, peak


def _tables(method: HilbertA | None, side: int, text: int) -> tuple[Any, ...]:
    return (method or HilbertA(tiles=1)).plan(((side, side),), text).tables


def _attention_seconds(transformer: FluxTransformer2DModel, side: int, text: int, rounds: int) -> list[float]:
    """Of each variant the median time of a layer's attention alone: softmax(q k) v, nothing around it."""
    config: Any = transformer.config
    shape = 1, side * side + text, config.num_attention_heads, config.attention_head_dim
    q, k, v = (
        torch.randn(shape, device=transformer.device, dtype=transformer.dtype).transpose(1, 2) for _ in range(3)
    )
    tables = [_tables(method, side, text)[0] for method in ATTENTION[1:]]
    calls = [
        partial(scaled_dot_product_attention, q, k, v),
        *(partial(block_attention, q, k, v, table) for table in tables),
    ]
    for call in calls:
        call()
    calls = [captured(call, transformer.device) for call in calls]
    return [median(taken) for taken in time_calls(calls, rounds, transformer.device)]


def _full_size(device: torch.device, dtype: torch.dtype) -> FluxPipeline:
    """A transformer of FLUX.1-dev's size without anything around it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with device:
        transformer = FluxTransformer2DModel(guidance_embeds=True).eval()
    torch.set_default_dtype(default)
    nothing: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **nothing)


def _random_step(transformer: FluxTransformer2DModel, side: int, text: int) -> dict[str, Any]:
    """Arguments of one forward over side x side image tokens, of random numbers."""
    config: Any = transformer.config
    like: dict[str, Any] = {"device": transformer.device, "dtype": transformer.dtype}
    return {
        "hidden_states": torch.randn(1, side * side, config.in_channels, **like),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, **like),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **like),
        "timestep": torch.full((1,), 0.5, **like),
        "guidance": torch.full((1,), 3.5, **like) if config.guidance_embeds else None,
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, side, side, **like),
        "txt_ids": torch.zeros(text, 3, **like),
        "return_dict": False,
    }


def _difference(pipe: Any, step: dict[str, Any], method: HilbertA | ToMA) -> float:
    """Relative difference between the dense step and one with a method, neither of them compiled."""
    with torch.compiler.set_stance("force_eager"):
        dense = pipe.transformer(**step)[0]
        with apply(pipe, method):
            other = pipe.transformer(**step)[0]
    return ((other - dense).float().norm() / dense.float().norm()).item()


def table_of(result: dict[str, Any]) -> Table:
    """The measurements, to print."""
    table = Table("tokens", "variant", "ms", "speed-up", "attention", "its speed-up", "FLOP bound", "MB")
    for row in result["rows"]:
        alone = "attention_share" in row
        table.add_row(
            f"{row['image_tokens']:,}", row["variant"], f"{1e3 * row['step_s']:.4g}", f"{row['speed_up']:.2f}x",
            f"{row['attention_share']:.0%}" if alone else "",
            f"{row['attention_speed_up']:.2f}x" if alone else "",
            f"{row['attention_flop_bound']:.2f}x" if alone else "",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
        )  # fmt: skip
    return table
