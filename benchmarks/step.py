"""Time one denoising step of a Flux, dense and with HilbertA, and write the numbers to benchmarks/results.

Check first: with one tile the step must be the dense step. Then time: the variants take turns in one process.

    python benchmarks/step.py --text 64                            # the built-in model's size, 256 px, this machine
    python benchmarks/step.py --full-size --side 128 --compile     # FLUX.1-dev's 12 B parameters at 2048 px, on a GPU
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from rich.console import Console
from rich.table import Table

import foveate
from foveate import HilbertA
from foveate.compare import versions
from foveate.demo.untrained import untrained_pipeline
from foveate.files import write_whole
from foveate.integrations.diffusers.pipelines import choose_device, choose_dtype, ready, time_steps


def main(
    side: Annotated[int, typer.Option(help="Image tokens along each side: 64 is 1024 px of FLUX.1.")] = 64,
    text: Annotated[int, typer.Option(help="Text tokens: FLUX.1 has 512, the built-in model 64.")] = 512,
    full_size: Annotated[bool, typer.Option(help="FLUX.1-dev's configuration with random weights.")] = False,
    compile: Annotated[bool, typer.Option(help="Compile the repeated blocks.")] = False,
    rounds: Annotated[int, typer.Option(help="How often each variant is timed.")] = 9,
    device: str = "auto",
    dtype: str = "auto",
    out: Annotated[Path, typer.Option(help="JSON to write.")] = Path("benchmarks/results/step-cpu.json"),
    commit: Annotated[str, typer.Option(help="The commit that is timed, where git cannot tell.")] = "",
) -> None:
    """Check, time and write."""
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    pipe = full_size_pipeline(where, precision) if full_size else ready(untrained_pipeline(), device, dtype)
    step = random_step(pipe.transformer, side, text)
    error = difference(pipe, step)
    tolerance = 1e-4 if precision == torch.float32 else 5e-2
    assert error < tolerance, f"one tile differs from dense by {error:.1e}: not timing a wrong step"
    if compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    methods = [None, HilbertA(tiles=1), HilbertA(tiles=4), HilbertA(tiles=16)]
    seconds = time_steps(pipe, step, methods, rounds)
    rows = []
    for method, taken in zip(methods, seconds, strict=True):
        tables = method.plan(((side, side),), text).tables if method else []
        rows.append(
            {
                "variant": method.title if method else "dense",
                "median_s": median(taken),
                "fastest_s": min(taken),
                "slowest_s": max(taken),
                "speed_up": median(seconds[0]) / median(taken),
                "attention_flop_bound": len(tables) / sum(1 - t.sparsity() for t in tables) if method else 1.0,
            }
        )
    result = {
        "what": "one forward of a Flux transformer with random weights",
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
        "image_tokens": side * side,
        "text_tokens": text,
        "dtype": str(precision),
        "compiled": compile,
        "rounds": rounds,
        "one_tile_relative_error": error,
        "steps": rows,
        "versions": versions() | ({"commit": commit} if commit else {}),
    }
    write_whole(out, json.dumps(result, indent=2).encode() + b"\n")
    table = Table("variant", "median s", "fastest", "slowest", "speed-up", "FLOP bound of attention")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row.values()))
    Console().print(table)


def full_size_pipeline(device: torch.device, dtype: torch.dtype) -> FluxPipeline:
    """A transformer of FLUX.1-dev's size without anything around it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with device:
        transformer = FluxTransformer2DModel(guidance_embeds=True).eval()
    torch.set_default_dtype(default)
    nothing: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **nothing)


def random_step(transformer: FluxTransformer2DModel, side: int, text: int) -> dict[str, Any]:
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


@torch.no_grad()
def difference(pipe: Any, step: dict[str, Any]) -> float:
    """Relative difference between the dense step and HilbertA with one tile."""
    dense = pipe.transformer(**step)[0]
    with foveate.apply(pipe, HilbertA(tiles=1)):
        one_tile = pipe.transformer(**step)[0]
    return ((one_tile - dense).float().norm() / dense.float().norm()).item()


if __name__ == "__main__":
    typer.run(main)
