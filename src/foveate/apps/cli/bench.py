"""`foveate bench`: the commands that time methods."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.apps.cli.common import check_writable, read_size
from foveate.apps.cli.methods import read_methods
from foveate.apps.cli.pictures import Frames
from foveate.apps.console import (
    Commit,
    Compile,
    Device,
    Dtype,
    Out,
    StepModel,
    StepText,
    TimedMethods,
    clear_errors,
    numbers,
    run_and_save,
)

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure the speed-up of a method for a model, a size and this machine.",
)

ContextModel = Annotated[
    str,
    typer.Option(
        help="A size with random weights: small (7 M parameters) or llama-8b (Llama-3.1-8B). Or your own language "
        "model: a hub id or a folder."
    ),
]


@app.command()
@clear_errors
def step(
    model: StepModel = "built-in",
    size: Annotated[
        str | None,
        typer.Option(
            help="Sizes in pixels, separated by commas: 1024, or WIDTHxHEIGHT. "
            "[dim]default: that of 64 x 64 tokens, 256 for the built-in model, 1024 for the others[/]"
        ),
    ] = None,
    frames: Frames = None,
    method: TimedMethods = None,
    compile: Compile = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help='Compile the repeated blocks with mode="reduce-overhead".')
    ] = False,
    text_tokens: StepText = None,
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks to build of minimax-h3; times are scaled to all. Default: as many as fit."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Measurements of each method; token merging runs whole cycles of its schedule."),
    ] = 9,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time one denoising step of a model, dense and with methods.

    Before anything is timed, settings that must equal the dense model are compared with it. The time of a step
    includes the reordering of tokens and, averaged over the schedule, the plans of token merging. On a GPU the step
    is also timed as one CUDA graph, without the cost of launching kernels. "Enqueued" is the time until Python
    returns; the bound is the speed-up of attention in FLOPs.

    foveate bench step --method toma --method toma:dst_every=20,weights_every=10      # any machine

    foveate bench step --model flux-dev --compile --size 1024,2048                    # a GPU with 40 GB or more

    foveate bench step --model sdxl --cuda-graphs                                     # where launches limit a step

    foveate bench step --model black-forest-labs/FLUX.1-schnell --method hilberta:tiles=16
    """
    from foveate.apps.bench.step import Setup, bench_step, table_of

    sizes, methods = [read_size(one) for one in size.split(",")] if size else [], read_methods(method)
    if method and not methods:
        raise ValueError("dense is always timed: name a method to compare it with")
    check_writable(out)
    how: dict[str, Any] = {"layers": num_layers, "compile": compile, "cuda_graphs": cuda_graphs}
    setup = Setup.of(model, methods=methods, text=text_tokens, device=device, dtype=dtype, **how)
    kind = "graphs" if cuda_graphs else "compiled" if compile else "eager"
    grids = [setup.grid(one, frames) for one in sizes] or [(64, 64)]
    name = f"step-{Path(model).name}-{kind}-{setup.about['device']}.json"
    run_and_save(out / name, commit, partial(bench_step, setup, grids, rounds=rounds), table_of)


@app.command()
@clear_errors
def context(
    model: ContextModel = "small",
    context_tokens: Annotated[str, typer.Option(help="Lengths of the contexts, separated by commas.")] = "2048",
    concurrent: Annotated[str, typer.Option(help="Numbers of concurrent questions, separated by commas.")] = "1,4,16",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    recompute: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the tokens to recompute.")] = 0.15,
    questions: Annotated[int, typer.Option(min=1, help="Questions measured for each result.")] = 16,
    out: Out = Path("bench"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    commit: Commit = "",
) -> None:
    """Time concurrent questions about long contexts of cached chunks, against full prefill and prefix caching.

    Times to the first token (50th and 99th percentile) begin when all questions of a round arrive. Each question has
    the same chunks in another order. Prefix caching needs one context for all questions; other contexts are full
    prefills. Before anything is timed, contexts with all tokens recomputed are compared with full prefills.

    foveate bench context                                                             # any machine

    foveate bench context --model llama-8b --context-tokens 8192,32768 --chunk 2048   # a GPU with 80 GB or more

    foveate bench context --model Qwen/Qwen3-8B --context-tokens 16384 --concurrent 1,8
    """
    from foveate.apps.bench.context import QuestionWorkload, bench_context, table_of
    from foveate.utils.device import choose_device, choose_dtype

    check_writable(out)
    where = choose_device(device)
    asked = QuestionWorkload(chunk, question_tokens, max_new_tokens, tuple(numbers(concurrent)), questions, recompute)
    if min(asked.concurrent) < 1:
        raise ValueError(f"--concurrent {concurrent} asks no question: use 1 or more")
    run = partial(bench_context, numbers(context_tokens), model, asked, where, choose_dtype(dtype, where))
    run_and_save(out / f"questions-{Path(model).name}-{where.type}.json", commit, run, table_of)
