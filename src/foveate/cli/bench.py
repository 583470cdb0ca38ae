"""Commands that measure speed: of attention, of one step of denoising or training, of contexts and of examples."""

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foveate.cli.common import Device, Dtype, clear_errors, progress, read_method, training_device

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Check, then time: ours and its peers in one process."
)

Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured; all take turns.")]
Text = Annotated[int, typer.Option(min=0, help="Text tokens: FLUX.1 has 512.")]
Out = Annotated[Path, typer.Option(help="Folder of the JSON and the plot.")]
Commit = Annotated[str, typer.Option(help="The commit that is timed, where git cannot tell.")]


@app.command()
@clear_errors
def attention(
    pixels: Annotated[str, typer.Option(help="Sides of FLUX.1 pictures, 16 px a token.")] = "1024,1536,2048,4096",
    tiles: Annotated[str, typer.Option(help="Tiles of HilbertA; 1 is a dense table.")] = "1,4,16",
    centre: Annotated[str, typer.Option(help="Sides of its central region.")] = "0.25,0",
    backward: Annotated[bool, typer.Option(help="Forward and backward together.")] = False,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 24,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    text: Text = 512,
    rounds: Rounds = 15,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of attention in FLUX.1's shapes, against the fastest dense attention and other sparse ones.

    foveate bench attention --pixels 1024 --tiles 16                  # a GPU

    foveate bench attention --pixels 512 --heads 2 --head-dim 64      # a CPU
    """
    from foveate.bench.attention import Case, bench_attention, draw_attention, table_of
    from foveate.machine import choose_device, choose_dtype
    from foveate.methods import HilbertA

    where = choose_device(device)
    cases = [
        Case(side, HilbertA(tiles=count, centre=square))
        for side in _numbers(pixels)
        for count in _numbers(tiles)
        for square in (_numbers(centre, float) if count > 1 else [0])
    ]
    run = partial(
        bench_attention, cases, where, choose_dtype(dtype, where), batch=batch, heads=heads, head_dim=head_dim,
        text=text, backward=backward, rounds=rounds,
    )  # fmt: skip
    path = out / f"attention-{'backward' if backward else 'forward'}-{where.type}.json"
    _keep(path, commit, run, table_of, draw_attention)


@app.command()
@clear_errors
def log_linear(
    tokens: Annotated[str, typer.Option(help="Lengths of the sequence.")] = "4096,16384,65536,262144,1048576",
    heads: Annotated[str, typer.Option(help="Heads of all samples.")] = "8,64",
    head_dim: Annotated[str, typer.Option(help="Channels of a head.")] = "64",
    levels: Annotated[str, typer.Option(help="Pooled levels: auto, or 1 to 4.")] = "auto",
    top_k: Annotated[str, typer.Option(help="Blocks that each block of queries picks.")] = "8",
    block_size: Annotated[int, typer.Option(help="Tokens of a block: 16, 32 or 64.")] = 16,
    inputs: Annotated[
        str, typer.Option(help="balanced: random numbers; skewed: a few blocks that all queries pick.")
    ] = "balanced",
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward together.")] = False,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Tokens of a head side by side; else, as in models, heads of a token.")
    ] = False,
    longest: Annotated[float, typer.Option(min=0, help="Seconds that a call may take: slower peers are skipped.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each is measured at most; slow ones less. All take turns.")
    ] = 15,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of log-linear attention at growing length, against dense attention and top-k of one level.

    foveate bench log-linear                                              # a GPU: about 4 minutes

    foveate bench log-linear --tokens 4096,65536 --heads 8 --backward --inputs balanced,skewed

    foveate bench log-linear --tokens 1024,4096,16384 --heads 2           # a CPU
    """
    from foveate.bench.log_linear import Case, How, bench_log_linear, draw_log_linear, table_of
    from foveate.machine import choose_device, choose_dtype

    where = choose_device(device)
    how = How(where, choose_dtype(dtype, where), backward, contiguous, longest, rounds)
    depths = [None if depth == "auto" else _numbers(depth)[0] for depth in levels.split(",")]
    series = product(_numbers(heads), _numbers(head_dim), depths, _numbers(top_k), [block_size], inputs.split(","))
    cases = [Case(length, *options) for options in series for length in sorted(_numbers(tokens))]
    path = out / f"log-linear-{'backward' if backward else 'forward'}-{where.type}.json"
    _keep(path, commit, partial(bench_log_linear, cases, how), table_of, draw_log_linear)


@app.command()
@clear_errors
def step(
    model: Annotated[
        str,
        typer.Option(
            help="Whose size, with random weights: built-in (17 M parameters), flux-dev (FLUX.1-dev, 12 B), "
            "sdxl (2.6 B; two samples, as guidance has them)."
        ),
    ] = "built-in",
    sides: Annotated[
        str,
        typer.Option(
            help="Image tokens along each side. 64 is 1024 px of FLUX.1, and of SDXL, whose largest maps with "
            "attention are counted; 256 px of the built-in model."
        ),
    ] = "64",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="What to time besides dense: hilberta, with options toma:keep=0.25,dst_every=20, several at once "
            "hilberta:tiles=16+toma. Repeat it for more. "
            "[dim]default: HilbertA and ToMA; of sdxl ToMA, ToMeSD, ToFu and ToDo[/]"
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the repeated blocks.")] = False,
    text: Annotated[
        int | None, typer.Option(min=0, help="Text tokens. [dim]default: 512, of sdxl 77, as the models have[/]")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each is timed; those that merge for whole cycles of their schedule.")
    ] = 9,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one denoising step of a model with random weights, dense and with methods, reorder and plans included.

    A profile tells which parts of a run that merges go into merging and into plans.
    Of SDXL it also prints what merging and unmerging lose of random and of smooth features: there are no pictures.

    foveate bench step --method toma --method toma:dst_every=20,weights_every=10      # any machine

    foveate bench step --model flux-dev --compile --sides 64,128                      # a GPU with 40 GB or more

    foveate bench step --model sdxl --compile                                         # a GPU with 16 GB or more
    """
    from foveate.bench.step import bench_step, table_of
    from foveate.machine import choose_device

    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else the profiler says when it begins and ends
    methods = [read_method(text) for text in method or []]
    name = f"step-{model}-{'compiled' if compile else 'eager'}"
    run = partial(
        bench_step,
        _numbers(sides), model=model, methods=methods, compile=compile, text=text, rounds=rounds, device=device,
        dtype=dtype,
    )  # fmt: skip
    _keep(out / f"{name}-{choose_device(device).type}.json", commit, run, table_of)


@app.command()
@clear_errors
def train(
    pixels: Annotated[str, typer.Option(help="Sides of the pictures.")] = "256,512",
    variants: Annotated[
        str,
        typer.Option(
            help="What to time: cudnn and fa2 (dense attention in cuDNN's kernel, in FlashAttention 2), dense (in "
            "PyTorch's choice), top-k (one level, no means), llsa, llsa-2 (two levels). "
            "[dim]default: all but dense; without a GPU dense and those of ours[/]"
        ),
    ] = "",
    dit: Annotated[str, typer.Option(help="Depth and width: DiT-XS, DiT-S, DiT-B.")] = "DiT-S",
    patch: Annotated[int, typer.Option(min=1, help="Pixels along each side of a token.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a step.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing: slower, much less memory.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    longest: Annotated[float, typer.Option(min=0, help="Seconds that a step may take: slower ones are skipped.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed at most; slow ones less.")] = 7,
    out: Out = Path("bench"),
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16: the weights stay in float32.")] = "auto",
    commit: Commit = "",
) -> None:
    """Time one training step of a pixel model with random weights, with dense and with log-linear attention.

    It is the step of [bold]foveate train[/]: forward, loss, backward, clipping, AdamW and the average of the weights.

    foveate bench train --compile                                         # a GPU: about 4 minutes

    foveate bench train --pixels 128 --batch 16 --variants cudnn,llsa     # as in the paper's ablation

    foveate bench train --pixels 32,64 --dit DiT-XS                       # a CPU
    """
    where = training_device(device)
    import torch

    from foveate.bench.train import How, bench_train, draw_train, table_of, usual_variants
    from foveate.machine import choose_dtype

    place = torch.device(where)
    precision = str(choose_dtype(dtype, place)).removeprefix("torch.")
    how = How(place, precision, dit, patch, batch, compile, checkpointing, longest, rounds)
    names = variants.split(",") if variants else usual_variants(place)
    path = out / f"train-{place.type}.json"
    _keep(path, commit, partial(bench_train, _numbers(pixels), names, how), table_of, draw_train)


@app.command()
@clear_errors
def context(
    tokens: Annotated[str, typer.Option(help="Lengths of the context.")] = "8192,16384,32768,65536",
    model: Annotated[
        str, typer.Option(help="Whose size, with random weights: llama-8b (Llama-3.1-8B), small (7 M parameters).")
    ] = "llama-8b",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 2048,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 64,
    recompute: Annotated[float, typer.Option(min=0, max=1, help="Fraction of rows to compute again.")] = 0.15,
    rounds: Rounds = 5,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time the first token behind a long context: full prefill, and cached chunks with some rows computed again.

    Timing only: the weights are random. Chunks lie in memory, but for one row that encodes them first.

    foveate bench context                                                     # a GPU with 60 GB or more

    foveate bench context --model small --tokens 2048 --chunk 512             # a CPU
    """
    from foveate.bench.context import How, bench_context, draw_context, table_of
    from foveate.machine import choose_device, choose_dtype

    where = choose_device(device)
    how = How(model, where, choose_dtype(dtype, where), chunk, prompt, recompute, rounds)
    path = out / f"context-{model}-{where.type}.json"
    _keep(path, commit, partial(bench_context, _numbers(tokens), how), table_of, draw_context)


@app.command()
@clear_errors
def examples(
    pool: Annotated[str, typer.Option(help="Numbers of examples to choose from.")] = "5000,20000,100000",
    picks: Annotated[int, typer.Option(min=1, help="Examples to choose.")] = 1024,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to deal them to.")] = 64,
    dim: Annotated[int, typer.Option(min=1, help="Numbers of an embedding.")] = 384,
    rounds: Rounds = 3,
    out: Out = Path("bench"),
    device: Device = "auto",
    commit: Commit = "",
) -> None:
    """Time Sub-CP: examples chosen from large pools, and dealt to blocks.

    With apricot-select installed, against its choice on the CPU, from pools of up to 5,000.

    foveate bench examples                                                    # a GPU

    foveate bench examples --pool 1000,4000 --picks 256 --blocks 16           # a CPU
    """
    from foveate.bench.examples import How, bench_examples, draw_examples, table_of
    from foveate.machine import choose_device

    if picks % blocks:
        raise ValueError(
            f"{picks} examples do not fill {blocks} blocks evenly: use --picks {picks // blocks * blocks}"
        )
    where = choose_device(device)
    run = partial(bench_examples, _numbers(pool), How(where, picks, blocks, dim, rounds))
    _keep(out / f"examples-{where.type}.json", commit, run, table_of, draw_examples)


def _numbers(text: str, kind: type = int) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        what, like = ("whole numbers", "64,128") if kind is int else ("numbers", "0.25,0")
        raise ValueError(f"{text!r} is no list of {what}: write them as {like}") from None


def _keep(
    path: Path,
    commit: str,
    run: Callable[..., Iterable[dict[str, Any]]],
    table: Callable[[dict[str, Any]], Any],
    draw: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Write every result as it comes, with its plot if there is one, and print the last."""
    from foveate.files import write_whole
    from foveate.report import figure_png

    result: dict[str, Any] = {"rows": []}
    with progress() as track:
        for result in run(track=track):
            if commit:
                result["versions"]["commit"] = commit
            write_whole(path, json.dumps(result, indent=2).encode() + b"\n")
            if draw:
                write_whole(path.with_suffix(".png"), figure_png(draw(result)))
    Console().print(table(result))
    print(path)
