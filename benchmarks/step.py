"""Time one denoising step of a Flux, dense and with HilbertA, and write the numbers to benchmarks/results.

Check first: with one tile the step must be the dense step. Then time: the variants take turns in one process.

    python benchmarks/step.py                                  # the small Flux at 4,096 tokens on this machine
    python benchmarks/step.py --device cuda --dtype bfloat16 --out benchmarks/results/step-h200.json
"""

import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import foveate
from foveate import HilbertA
from foveate.compare import versions
from foveate.demo.untrained import untrained_pipeline
from foveate.files import write_whole
from foveate.integrations.diffusers.pipelines import Request, ready, record_step, time_steps


def main(
    size: Annotated[int, typer.Option(help="Side of the picture in pixels; 4 px a token.")] = 256,
    rounds: Annotated[int, typer.Option(help="How often each variant is timed.")] = 9,
    device: str = "auto",
    dtype: str = "auto",
    out: Annotated[Path, typer.Option(help="JSON to write.")] = Path("benchmarks/results/step-cpu.json"),
    commit: Annotated[str, typer.Option(help="The commit that is timed, where git cannot tell.")] = "",
) -> None:
    """Check, time and write."""
    pipe = ready(untrained_pipeline(), device, dtype)
    step = record_step(pipe, Request("a red apple", (size, size), 1, None, 0))
    error = difference(pipe, step)
    tolerance = 1e-4 if pipe.dtype == torch.float32 else 3e-2
    assert error < tolerance, f"one tile differs from dense by {error:.1e}: not timing a wrong step"
    variants = [(), (HilbertA(tiles=1),), (HilbertA(tiles=4),), (HilbertA(tiles=16),)]
    seconds = time_steps(pipe, step, variants, rounds)
    text, tokens = step["encoder_hidden_states"].shape[1], step["hidden_states"].shape[1]
    rows = []
    for methods, taken in zip(variants, seconds, strict=True):
        bound = 1.0
        if methods:
            side = round(tokens**0.5)
            tables = methods[0].plan(((side, side),), text).tables
            bound = len(tables) / sum(1 - table.sparsity() for table in tables)
        rows.append(
            {
                "variant": methods[0].title if methods else "dense",
                "median_s": median(taken),
                "fastest_s": min(taken),
                "slowest_s": max(taken),
                "speed_up": median(seconds[0]) / median(taken),
                "attention_flop_bound": bound,
            }
        )
    parameters = sum(p.numel() for p in pipe.transformer.parameters())
    result = {
        "what": "one forward of a Flux transformer with random weights",
        "parameters": parameters,
        "image_tokens": tokens,
        "text_tokens": text,
        "dtype": str(pipe.dtype),
        "rounds": rounds,
        "one_tile_relative_error": error,
        "steps": rows,
        "versions": versions(),
        "commit": commit or described(),
    }
    write_whole(out, json.dumps(result, indent=2).encode() + b"\n")
    table = Table("variant", "median s", "fastest", "slowest", "speed-up", "FLOP bound of attention")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row.values()))
    Console().print(table)


@torch.no_grad()
def difference(pipe, step) -> float:
    """Relative difference between the dense step and HilbertA with one tile."""
    dense = pipe.transformer(**step)[0]
    with foveate.apply(pipe, HilbertA(tiles=1)):
        one_tile = pipe.transformer(**step)[0]
    return ((one_tile - dense).float().norm() / dense.float().norm()).item()


def described() -> str:
    """The commit that was timed, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    typer.run(main)
