"""Commands of the lab: benchmarks against other implementations, and training of the built-in models."""

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.bench import Commit, Methods, Out, Rounds, Sides, StepModel, StepText, numbers, run_and_save
from foveate.cli.common import (
    Device,
    Dtype,
    Minutes,
    Seed,
    clear_errors,
    console,
    progress,
    read_method,
    say_whether_done,
    training_device,
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=__doc__)


@app.command()
@clear_errors
def attention(
    pixels: Annotated[
        str, typer.Option(help="Sides of FLUX.1 pictures in pixels; a token is 16 x 16.")
    ] = "1024,1536,2048,4096",
    tiles: Annotated[str, typer.Option(help="Numbers of HilbertA tiles; 1 is a dense block table.")] = "1,4,16",
    centre: Annotated[str, typer.Option(help="Sides of HilbertA's central region, as fractions.")] = "0.25,0",
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
    """Time one call of block-sparse attention in FLUX.1's shapes, against dense attention and FlexAttention.

    python -m lab attention --pixels 1024 --tiles 16                  # a GPU

    python -m lab attention --pixels 512 --heads 2 --head-dim 64      # a CPU
    """
    from foveate.methods import HilbertA
    from foveate.utils.device import choose_device, choose_dtype
    from lab.bench.attention import Case, bench_attention, draw_attention, table_of

    where = choose_device(device)
    cases = [
        Case(side, HilbertA(tiles=count, centre=square))
        for side in numbers(pixels)
        for count in numbers(tiles)
        for square in (numbers(centre, float) if count > 1 else [0])
    ]
    run = partial(
        bench_attention, cases, where, choose_dtype(dtype, where), batch=batch, heads=heads, head_dim=head_dim,
        text=text, backward=backward, rounds=rounds,
    )  # fmt: skip
    path = out / f"attention-{'backward' if backward else 'forward'}-{where.type}.json"
    run_and_save(path, commit, run, table_of, draw_attention)


@app.command()
@clear_errors
def log_linear(
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
        int, typer.Option(min=1, help="Most measurements of each candidate; slow ones get fewer. They take turns.")
    ] = 15,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one call of log-linear attention at growing lengths, against dense attention and one-level top-k.

    python -m lab log-linear                                              # a GPU: about 4 minutes

    python -m lab log-linear --tokens 4096,65536 --heads 8 --backward --inputs balanced,skewed

    python -m lab log-linear --tokens 1024,4096,16384 --heads 2           # a CPU
    """
    from foveate.utils.device import choose_device, choose_dtype
    from lab.bench.log_linear import Case, How, bench_log_linear, draw_log_linear, table_of

    where = choose_device(device)
    how = How(where, choose_dtype(dtype, where), backward, contiguous, longest, rounds)
    depths = [None if depth == "auto" else numbers(depth)[0] for depth in levels.split(",")]
    series = product(numbers(heads), numbers(head_dim), depths, numbers(top_k), [block_size], inputs.split(","))
    cases = [Case(length, *options) for options in series for length in sorted(numbers(tokens))]
    path = out / f"log-linear-{'backward' if backward else 'forward'}-{where.type}.json"
    run_and_save(path, commit, partial(bench_log_linear, cases, how), table_of, draw_log_linear)


@app.command()
@clear_errors
def step_profile(
    model: StepModel = "built-in",
    sides: Sides = "64",
    method: Methods = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the repeated blocks.")] = False,
    text: StepText = None,
    rounds: Rounds = 9,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Show where the time of a denoising step goes: attention, merging, plans.

    [bold]foveate bench step[/] measures the time itself. For SDXL it also prints how much of random and of smooth
    features merging and unmerging lose, because with random weights there are no pictures to judge.

    python -m lab step-profile --model sdxl --compile
    """
    from foveate.utils.device import choose_device
    from lab.bench.step_profile import profile_step, table_of

    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences the profiler
    methods = [read_method(text) for text in method or []]
    run = partial(
        profile_step,
        numbers(sides), model=model, methods=methods, compile=compile, text=text, rounds=rounds, device=device,
        dtype=dtype,
    )  # fmt: skip
    name = f"step-profile-{Path(model).name}-{'compiled' if compile else 'eager'}-{choose_device(device).type}"
    run_and_save(out / f"{name}.json", commit, run, table_of)


@app.command()
@clear_errors
def train(
    pixels: Annotated[str, typer.Option(help="Sides of the pictures in pixels.")] = "256,512",
    variants: Annotated[
        str,
        typer.Option(
            help="What to time: cudnn, fa2 (dense attention by cuDNN or FlashAttention 2), dense (PyTorch's choice), "
            "top-k (one level, no means), llsa, llsa-2 (two levels). "
            "[dim]default: all but dense; without a GPU dense, top-k and llsa[/]"
        ),
    ] = "",
    dit: Annotated[str, typer.Option(help="Depth and width: DiT-XS, DiT-S, DiT-B.")] = "DiT-S",
    patch: Annotated[int, typer.Option(min=1, help="Pixels along each side of a token.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing: slower, much less memory.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    longest: Annotated[float, typer.Option(min=0, help="Longest step in seconds; slower variants are skipped.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Most measurements of each variant; slow ones get fewer.")] = 7,
    out: Out = Path("bench"),
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16: the weights stay in float32.")] = "auto",
    commit: Commit = "",
) -> None:
    """Time one training step of a pixel model with random weights, with dense and with log-linear attention.

    The step is that of [bold]foveate train[/]: forward, loss, backward, clipping, AdamW and the average of the
    weights.

    python -m lab train --compile                                         # a GPU: about 4 minutes

    python -m lab train --pixels 128 --batch 16 --variants cudnn,llsa     # as in the paper's ablation

    python -m lab train --pixels 32,64 --dit DiT-XS                       # a CPU
    """
    where = training_device(device)
    import torch

    from foveate.utils.device import choose_dtype
    from lab.bench.train import How, bench_train, draw_train, table_of, usual_variants

    place = torch.device(where)
    precision = str(choose_dtype(dtype, place)).removeprefix("torch.")
    how = How(place, precision, dit, patch, batch, compile, checkpointing, longest, rounds)
    names = variants.split(",") if variants else usual_variants(place)
    path = out / f"train-{place.type}.json"
    run_and_save(path, commit, partial(bench_train, numbers(pixels), names, how), table_of, draw_train)


@app.command()
@clear_errors
def context(
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
    from foveate.utils.device import choose_device, choose_dtype
    from lab.bench.context import Settings, bench_context, draw_context, table_of

    where = choose_device(device)
    settings = Settings(model, where, choose_dtype(dtype, where), chunk, prompt, recompute, rounds)
    path = out / f"context-{model}-{where.type}.json"
    run_and_save(path, commit, partial(bench_context, numbers(tokens), settings), table_of, draw_context)


@app.command()
@clear_errors
def examples(
    pool: Annotated[str, typer.Option(help="Sizes of the pool of examples.")] = "5000,20000,100000",
    picks: Annotated[int, typer.Option(min=1, help="Number of examples to select.")] = 1024,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks to split them into.")] = 64,
    dim: Annotated[int, typer.Option(min=1, help="Dimension of an embedding.")] = 384,
    rounds: Rounds = 3,
    out: Out = Path("bench"),
    device: Device = "auto",
    commit: Commit = "",
) -> None:
    """Time Sub-CP: select examples from large pools and split them into blocks.

    If apricot-select is installed, its selection on the CPU is timed too, for pools of up to 5,000 examples.

    python -m lab examples                                                    # a GPU

    python -m lab examples --pool 1000,4000 --picks 256 --blocks 16           # a CPU
    """
    from foveate.utils.device import choose_device
    from lab.bench.examples import Settings, bench_examples, draw_examples, table_of

    if picks % blocks:
        raise ValueError(
            f"{picks} examples do not fill {blocks} blocks evenly: use --picks {picks // blocks * blocks}"
        )
    where = choose_device(device)
    run = partial(bench_examples, numbers(pool), Settings(where, picks, blocks, dim, rounds))
    run_and_save(out / f"examples-{where.type}.json", commit, run, table_of, draw_examples)


@app.command()
@clear_errors
def built_in(
    part: Annotated[str, typer.Option(help="recogniser, vae, flow (which needs the vae), or all.")] = "all",
    out: Annotated[Path, typer.Option(help="Folder of the run; an existing run is resumed.")] = Path("demo-run"),
    start: Annotated[
        Path | None, typer.Option(help="Pipeline folder to fine-tune: runs only the last stage of the flow.")
    ] = None,
    seed: Seed = 0,
    minutes: Minutes = float("inf"),
    scale: Annotated[
        float, typer.Option(min=0, help="Multiplies the recipe's pictures and steps; 0.01 is a quick test.")
    ] = 1.0,
    batch: Annotated[
        float, typer.Option(min=0, help="Multiplies the flow's batches, made for 140 GB of memory; 0.01 fits a CPU.")
    ] = 1.0,
    sample_every: Annotated[int, typer.Option(min=0, help="Steps between sample pictures; 0: none.")] = 1000,
    compile: Annotated[bool, typer.Option(help="Compile the transformer (GPU; a minute for each size).")] = False,
) -> None:
    """Train the built-in model from scratch: the recogniser that judges it, the autoencoder, the transformer.

    You may stop it at any time; the same command resumes from the newest checkpoint. On several GPUs:

    torchrun --nproc-per-node 4 -m lab built-in --compile
    """
    from lab.training.make import make

    with progress() as track:
        done = make(
            out, part=part, start=start, seed=seed, minutes=minutes, scale=scale, batch=batch,
            sample_every=sample_every, compile=compile, track=track,
        )  # fmt: skip
    say_whether_done(done, out)


@app.command()
@clear_errors
def reader(
    out: Annotated[Path, typer.Option(help="Folder of the run; an existing run is resumed.")] = Path("reader-run"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    batch: Annotated[int, typer.Option(min=8, help="Texts in a step; 32 suits a CPU.")] = 256,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = 256,
    minutes: Minutes = float("inf"),
    seed: Seed = 0,
) -> None:
    """Train the built-in reader from scratch: a small Llama that answers questions about texts of facts.

    AutoModelForCausalLM and AutoTokenizer load the folder "reader" of the run. accuracy.csv records how many
    questions of each kind it answers, every 1,000 steps. The same command resumes from the newest checkpoint.
    """
    from lab.training.reader import ReaderRecipe, train_reader

    recipe = ReaderRecipe(steps=steps, batch=batch, layers=layers, width=width, seed=seed)
    with progress() as track:
        done = train_reader(out, recipe, minutes=minutes, track=track)
    console.print((out / "accuracy.csv").read_text(), end="")
    say_whether_done(done, out / "reader")


@app.command()
@clear_errors
def atlas(
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("atlas.png"),
    font: Annotated[
        Path | None, typer.Option(help="NotoColorEmoji.ttf. [dim]default: where Linux distributions install it[/]")
    ] = None,
) -> None:
    """Draw the emoji of the scenes from the font. Only a new vocabulary needs this; the package holds the result."""
    from lab.training.atlas import write_atlas

    write_atlas(out, font)
    print(out)


if __name__ == "__main__":
    app(prog_name="python -m lab")
