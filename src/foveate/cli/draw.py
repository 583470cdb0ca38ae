"""Commands that draw: one picture, one prompt side by side, many prompts judged."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from foveate.cli.common import (
    Device,
    Dtype,
    Guidance,
    Lora,
    Model,
    Seed,
    Size,
    Steps,
    check_size,
    check_writable,
    clear_errors,
    console,
    lora_of,
    open_model,
    options_of,
    progress,
    read_method,
    remark_on,
    request_of,
    settings_of,
    size_with,
)
from foveate.methods import METHODS, ComposedMethod, Method, method_from_text

__all__ = ["compare", "evaluate", "generate"]


@clear_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Model = "",
    size: Size = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"dense, {', '.join(METHODS)}, or several: hilberta:tiles=16+toma. "
            "[dim]default: what the LoRA was distilled for, else dense[/]"
        ),
    ] = None,
    tiles: Annotated[str | None, typer.Option(help="Tiles of the method: a number, or auto.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Any option of the method: -o centre=0 -o period=2.")
    ] = None,
    lora: Lora = "",
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="PNG to write. [dim]default: named after the prompt[/]")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one picture. The PNG carries its settings, and is named after prompt, seed and method.

    foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048 --method hilberta --tiles 16
    """
    options = options_of(option, tiles)
    chosen: Any = None if lora else _method(method, options)
    if out and (out.suffix.lower() != ".png" or out.is_dir()):
        raise ValueError(f"--out names the PNG file to write, not {out}: end it with .png")
    check_size(size)
    check_writable(out.parent if out else Path())
    pipe = open_model(model, device, dtype)
    distilled = lora_of(pipe, lora)
    request = request_of(pipe, model, prompt, size_with(distilled, size), steps, guidance, seed)
    chosen = _way_with(distilled, method, options) if lora else chosen
    if method == "dense":
        _own(pipe)
    from foveate.diffusers.apply import apply
    from foveate.diffusers.lora import using
    from foveate.diffusers.pipelines import denoiser, draw
    from foveate.utils.files import slug, write_picture

    path = out or Path(f"{slug(prompt)}-{seed}{'-' + slug(chosen.title) if chosen else ''}.png")
    config: Any = denoiser(pipe).config
    plain = config.get("attention", "dense")  # a pixel model has one of its own
    if remark := remark_on(pipe, model, prompt):
        console.print(escape(remark))
    with progress() as track:
        advance, began = track(chosen.title if chosen else plain, request.steps), time.perf_counter()
        with using(pipe, chosen) if distilled else apply(pipe, *chosen.parts) if chosen else nullcontext() as run:
            image = draw(pipe, request, advance)
            summary = run.summary() if run else None
        ran = repr(chosen.method if distilled else chosen) if chosen else plain
        about = {"method": ran, "seconds": f"{time.perf_counter() - began:.1f}"} | ({"lora": lora} if lora else {})
        if summary and all(layer.why for layer in summary.layers):
            about["stayed dense"] = summary.layers[0].why
        write_picture(path, image, {**settings_of(pipe, model, request), **about})
    if summary is not None:
        print(summary)
    console.print(f"drawn in {about['seconds']} s")
    print(path)


@clear_errors
def compare(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Model = "",
    size: Size = None,
    lora: Lora = "",
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often each variant's step is timed.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the page and its pictures.")] = Path("compare"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one prompt dense and with every method: pictures, times and patterns on one HTML page.

    With --lora also distilled, which is slower than the method alone: its LoRA is kept apart from the weights.

    A model of foveate train is shown dense and with log-linear attention as it was made.

    foveate compare "a red apple above a blue car"
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out names a folder for the page, but {out} is a file: name another")
    check_size(size)
    check_writable(out)
    pipe = open_model(model, device, dtype)
    distilled = lora_of(pipe, lora)
    request = request_of(pipe, model, prompt, size_with(distilled, size), steps, guidance, seed)
    from foveate.web import compare as side_by_side

    methods = _and_distilled(distilled, lora, _own(pipe) or side_by_side.showcase())
    with progress() as track:
        page = side_by_side.compare(
            pipe,
            request,
            methods,
            out,
            settings=settings_of(pipe, model, request) | ({"LoRA": lora} if lora else {}),
            notice=remark_on(pipe, model, prompt),
            rounds=rounds,
            track=track,
        )
    console.print("open the page in a browser:")
    print(page.resolve())


@clear_errors
def evaluate(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="hilberta, with options hilberta:tiles=16,centre=0, several at once hilberta+toma. Repeat it for "
            "more. [dim]default: the settings that compare shows[/]"
        ),
    ] = None,
    model: Model = "",
    lora: Lora = "",
    prompts: Annotated[int, typer.Option(min=2, max=100_000, help="Held-out captions to draw.")] = 100,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Pictures drawn together.")] = 1,
    dino: Annotated[
        str,
        typer.Option(
            help="Hub id or folder of a DINO model, such as facebook/dino-vits16, by whose features the distance to "
            "dense pictures is taken. [dim]default: the recogniser's[/]"
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder of pictures and scores; a run found there is gone on with.")
    ] = Path("eval"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Judge methods by many pictures: are the requested objects there, do they stand as asked, how near to dense.

    The captions are ones that the built-in model was never trained on. A recogniser, trained on real renderings, looks
    at every picture. Numbers come with 95 % intervals. Ctrl-C loses nothing: run the same command again.

    foveate eval --method hilberta:tiles=4 --method hilberta:tiles=16 --prompts 100 --seed 0

    With --lora a method is judged as it is and distilled: foveate eval --lora distilled --prompts 100
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out names a folder for the results, but {out} is a file: name another")
    check_size(size)
    check_writable(out)
    methods = [read_method(text) for text in method or []]
    pipe = open_model(model, device, dtype)
    distilled = lora_of(pipe, lora)
    request = request_of(pipe, model, "", size_with(distilled, size), steps, guidance, seed)
    from foveate.demo.evaluate import evaluate, score_table
    from foveate.web.compare import showcase

    own = _own(pipe)
    ways = _and_distilled(distilled, lora, methods or own or ([] if lora else showcase()))
    with progress() as track:
        scores = evaluate(
            pipe,
            ways,
            out,
            prompts=prompts,
            request=request,
            batch=batch,
            dino=dino,
            track=track,
            left_out=None if method or own or lora else console.print,
        )
    Console(width=None if sys.stdout.isatty() else 1000).print(score_table(scores))
    for name in ("scores.json", "sheet.png"):
        print(out / name)


def _method(name: str | None, options: dict[str, str]) -> Method | ComposedMethod | None:
    if name and set(name) & set("+:"):
        if options:
            raise ValueError(f"write all options into --method {name}, such as hilberta:tiles=16+toma:keep=0.5")
        return read_method(name)
    if name not in (None, "dense"):
        return method_from_text(name, options)
    if options:
        raise ValueError(
            f"dense takes no options ({', '.join(options)}): name a method, --method {next(iter(METHODS))}"
        )
    return None


def _way_with(distilled: Any, name: str | None, options: dict[str, str]) -> Any:
    """What to draw with a LoRA: what it was distilled for, unless it is of another make."""
    if distilled is None:
        return _method(name, options)
    from foveate.diffusers.lora import adapted

    if name is None:
        name = next(name for name, cls in METHODS.items() if isinstance(distilled.method, cls))
    return adapted(distilled, _method(name, options), set(options))


def _own(pipe: Any) -> list[Method]:
    """The log-linear attention of a pixel model, which is dense from now on without it; nothing of other models."""
    from foveate.diffusers.pixel_pipeline import PixelPipeline, as_method

    return [as_method(pipe)] if isinstance(pipe, PixelPipeline) else []


def _and_distilled(distilled: Any, lora: str, methods: Sequence[Method | ComposedMethod]) -> list[Any]:
    """The methods, then what the LoRA was distilled for: without it and with it."""
    if not lora:
        return [*methods]
    if distilled is None:
        raise ValueError(f"{lora} does not say what it was distilled for: only generate takes LoRAs of another make")
    alone = [] if distilled.method in methods else [distilled.method]
    return [*methods, *alone, distilled]
