"""The commands that draw: one picture, one prompt side by side, many prompts with scores."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from zlib import crc32

import typer
from rich.console import Console
from rich.markup import escape

from foveate.cli.common import (
    Device,
    Dtype,
    Model,
    Option,
    Seed,
    Size,
    Tiles,
    check_file,
    check_writable,
    clear_errors,
    console,
    is_preset,
    join_processes,
    open_model,
    options_of,
    progress,
    read_methods,
    read_prompts,
    read_size,
    read_variant,
    request_of,
)
from foveate.demo import LORA, PIPELINE
from foveate.diffusers.preset import Preset
from foveate.methods import METHODS, ComposedMethod, Method, method_from_text
from foveate.utils.device import choose_device, choose_dtype
from foveate.utils.errors import noting
from foveate.utils.processes import check_shared, divide, rank_name

__all__ = ["compare", "evaluate", "generate"]

Lora = Annotated[
    str,
    typer.Option(
        help="LoRA of [bold]foveate distill[/]: a file, folder or hub id, or built-in for that of the built-in model. "
        "It brings its method and its size."
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="Denoising steps. [dim]default: 28; for the built-in model 20[/]"),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1000,
        help="Guidance scale. With --negative, and in models without a guidance input, every step runs the model "
        "twice. [dim]default: the pipeline's[/]",
    ),
]
Negative = Annotated[
    str | None, typer.Option(help="Negative prompt: what not to draw. It needs a guidance scale above 1.")
]
Frames = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100_000,
        help="Frames of a video: a multiple of what the model packs into one, plus 1, such as 81 for Wan. 1 is a "
        "picture. [dim]default: the pipeline's[/]",
    ),
]
Fps = Annotated[
    int | None,
    typer.Option(min=1, max=240, help="Frames per second of a video. [dim]default: the pipeline's, else 16[/]"),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Method beside dense: hilberta; with options, hilberta:tiles=16,centre=0; combined, hilberta+toma. "
        "Repeat the option for more. [dim]default: every method[/]"
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="Picture to start from: the first frame of a video, or a reference to edit. Repeat the option for "
        "more references. Give --size the proportions of the first frame.",
    ),
]


@clear_errors
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to draw.", show_default=False)] = None,
    model: Model = "",
    size: Size = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"dense, {', '.join(METHODS)}, several: hilberta:tiles=16+toma, or a preset of foveate tune. "
            "[dim]default: the method of the LoRA, else dense[/]"
        ),
    ] = None,
    tiles: Tiles = None,
    option: Option = None,
    lora: Lora = "",
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    image: Images = None,
    frames: Frames = None,
    fps: Fps = None,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100_000, help="Pictures of each prompt, with --seed and the seeds after it.")
    ] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with a prompt a line, in place of one prompt.", show_default=False)
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="What several processes divide: the tokens of each picture, or the prompts and seeds. "
            "[dim]default: picture if there is one to draw, else prompts[/]",
            metavar="picture|prompts",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="PNG or MP4 file; with --prompts or --seeds a folder, whose pictures are not drawn again. "
            "[dim]default: named after prompt, seed and method; the folder pictures[/]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one picture or video, and print what each attention layer did. A PNG file contains the settings.

    foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048 --method hilberta --tiles 16

    foveate generate "waves at a lighthouse" --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --frames 81

    Many, into a folder: after Ctrl-C or a failure the same command draws what is missing.

    foveate generate --prompts prompts.txt --seeds 4 --out pictures

    On several GPUs or nodes: the processes draw one picture together, sooner, or each its part of many.

    torchrun --nproc-per-node 4 -m foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048

    accelerate launch -m foveate generate --prompts prompts.txt --model black-forest-labs/FLUX.1-dev
    """
    if (prompt is None) == (prompts is None):
        raise ValueError('say what to draw, foveate generate "a lighthouse", or name a file of prompts with --prompts')
    if split not in (None, "picture", "prompts"):
        raise ValueError(f"unknown --split {split}: several processes divide each picture, or the prompts")
    texts, many = read_prompts(prompts) if prompts else [prompt or ""], prompts is not None or seeds > 1
    options = options_of(option, tiles)
    chosen: Any = None if lora else _method(method, options)
    if isinstance(chosen, Preset) and not size:
        size = "{1}x{0}".format(*chosen.size)
    if many and out and out.suffix.lower() in (".png", ".mp4"):
        raise ValueError(f"--out names the folder of many pictures, not {out}: leave {out.suffix} out")
    if not many and out and out.suffix.lower() != ".mp4":
        check_file(out, "a PNG or MP4 file", ".png")
    if out and not many and out.exists() and not force:
        raise ValueError(f"{out} exists: name another --out, or overwrite it with --force")
    folder = (out or Path("pictures")) if many else out.parent if out else Path()
    state, device = join_processes(device)
    pipe, distilled, request = _opened(
        model, lora, texts[0], size, steps, guidance, seed, folder, device, dtype,
        negative=negative, images=tuple(image or ()), frames=frames, fps=fps,
    )  # fmt: skip
    suffix = _suffix(pipe, request)
    if out and not many:
        check_file(out, f"{'an MP4' if suffix == '.mp4' else 'a PNG'} file", suffix)
    chosen = method_with_lora(distilled, method, options) if lora else chosen
    if method == "dense":
        _own_attention(pipe)
    together = state.num_processes > 1 and (split or ("prompts" if many else "picture")) == "picture"
    if together:
        from foveate.diffusers.parallel import share_pictures

        share_pictures(pipe, state.num_processes)
    for text in texts:
        if remark := remark_on(pipe, model, text):
            console.print(escape(f"{text}: {remark}" if many else remark))
    from accelerate.utils import gather_object

    from foveate.diffusers.apply import apply
    from foveate.diffusers.lora import using
    from foveate.diffusers.pipelines import denoiser, draw
    from foveate.utils.files import slug, write_whole

    config: Any = denoiser(pipe).config
    plain = config.get("attention", "dense")  # pixel models have an attention of their own
    about = {"method": repr(chosen.method if distilled else chosen) if chosen else plain}
    about |= {"lora": lora} if lora else {}
    if many:
        requests = [request._replace(prompt=text, seed=seed + i) for text in texts for i in range(seeds)]
        check_shared(folder)
        with state.main_process_first():
            jobs = _claimed(folder, suffix, requests, pipe, settings_of(pipe, model, request) | about)
    else:
        name = f"{slug(texts[0])}-{seed}{'-' + slug(chosen.title) if chosen else ''}"
        numbered = (Path(f"{name}{f'-{i}' if i else ''}{suffix}") for i in chain([0], count(2)))
        jobs = {out or next(path for path in numbered if force or not path.exists()): request}
    missing = [(path, job) for path, job in jobs.items() if not (many and path.exists())]
    mine, summary, seconds = divide(missing, together=together), None, list[float]()
    with (
        progress() as track,
        using(pipe, chosen) if distilled else apply(pipe, chosen) if chosen else nullcontext() as run,
    ):
        title = chosen.title if chosen else plain
        if len(mine) < len(missing):
            title += f", part 1 of {state.num_processes}"  # only the first process shows progress
        advance = track(title, len(mine) if many else request.steps)
        for path, job in mine:
            began = time.perf_counter()
            with noting(f"drawing {job.prompt!r} with seed {job.seed}"):
                drawn = draw(pipe, job, (lambda: None) if many else advance)
            seconds.append(time.perf_counter() - began)
            summary = run.summary() if run else None
            if state.is_main_process or not together:
                told = settings_of(pipe, model, job) | about | {"seconds": f"{seconds[-1]:.1f}"}
                _write(path, drawn, pipe, job, told, summary)
            if many:
                advance()
    seconds = gather_object(seconds)
    if not state.is_main_process:
        return
    if summary is not None:
        print(summary)
    if not many:
        console.print(f"drawn in {seconds[0]:.1f} s")
        print(*jobs)
        return
    if missing:
        console.print(f"{len(missing)} drawn, {median(seconds):.1f} s each")
    index = {path.name: {"prompt": job.prompt, "seed": job.seed} for path, job in jobs.items()}
    write_whole(folder / "pictures.json", json.dumps(index, indent=2, ensure_ascii=False).encode())
    print(folder)


@clear_errors
def compare(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Model = "",
    size: Size = None,
    method: Methods = None,
    lora: Lora = "",
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    image: Images = None,
    frames: Frames = None,
    fps: Fps = None,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Timed steps of each variant.")] = 3,
    out: Annotated[
        Path, typer.Option(help="Folder for the page and its pictures; pictures that are there are not drawn again.")
    ] = Path("compare"),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw one prompt dense and with methods, on one HTML page with a verdict, pictures or videos, and times.

    The page is written as the pictures arrive; after Ctrl-C the same command resumes. The built-in model is shown with
    each method at its recommended setting, its own LoRA included. With --lora the page shows a method with the LoRA,
    merged into the weights, and without. Other models are shown with every method, which starts when the composition
    is settled: after a fifth of the steps, in videos after two fifths. A model of foveate train has its own log-linear
    attention.

    foveate compare "a red apple above a blue car"

    foveate compare "a lighthouse" --model black-forest-labs/FLUX.1-dev --method toma --method hilberta:tiles=16
    """
    if rank_name():
        raise ValueError("compare measures the time of one process: start it without torchrun or accelerate launch")
    asked = read_methods(method)
    recommended = not (model or lora or asked)
    lora = "built-in" if recommended else lora
    pipe, distilled, request = _opened(
        model, lora, prompt, size, steps, guidance, seed, out, device, dtype,
        negative=negative, images=tuple(image or ()), frames=frames, fps=fps,
    )  # fmt: skip
    _suffix(pipe, request)
    from foveate.demo.recogniser import judge_prompt
    from foveate.demo.text import draws_scenes
    from foveate.diffusers.card import card_of
    from foveate.diffusers.pipelines import denoiser
    from foveate.web import compare as side_by_side

    if recommended:
        methods = side_by_side.showcase(distilled)
    else:
        start = 0.0 if lora else card_of(denoiser(pipe)).start_percent  # LoRAs are distilled for all steps
        methods = asked or _own_attention(pipe) or side_by_side.showcase(start_percent=start)
        methods = _with_distilled(distilled, lora, methods)
    judge = judge_prompt(prompt) if draws_scenes(pipe) else None
    with progress() as track:
        settings = settings_of(pipe, model, request) | ({"LoRA": lora} if lora else {})
        notice = remark_on(pipe, model, prompt)
        page = side_by_side.compare(
            pipe, request, methods, out, settings=settings, notice=notice, judge=judge, rounds=rounds, track=track
        )
    console.print("open the page in a browser:")
    print(page.resolve())


@clear_errors
def evaluate(
    method: Methods = None,
    model: Model = "",
    lora: Lora = "",
    prompts: Annotated[int, typer.Option(min=2, max=100_000, help="Number of held-out captions to draw.")] = 100,
    size: Size = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Batch size.")] = 1,
    dino: Annotated[
        str,
        typer.Option(
            help="Hub id or folder of a DINO model, such as facebook/dino-vits16, whose features give the distance to "
            "the dense pictures. [dim]default: the features of the recogniser[/]"
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for pictures and scores; an existing run is resumed.")] = Path(
        "eval"
    ),
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Score methods on many pictures: requested objects and relations that are there, and distance to dense.

    The captions are scenes that the built-in model was never trained on. A recogniser, trained on real renderings,
    judges every picture. Scores have 95 % confidence intervals. After Ctrl-C the same command resumes.

    foveate eval --method hilberta:tiles=4 --method hilberta:tiles=16 --prompts 100 --seed 0

    On several GPUs or nodes, which divide the pictures: accelerate launch -m foveate eval ...

    With --lora the method is scored with and without the LoRA: foveate eval --lora distilled --prompts 100
    """
    asked = read_methods(method)
    state, device = join_processes(device)
    pipe, distilled, request = _opened(model, lora, "", size, steps, guidance, seed, out, device, dtype)
    from foveate.demo.evaluate import evaluate, score_table
    from foveate.demo.text import draws_scenes
    from foveate.web.compare import showcase

    if not draws_scenes(pipe):
        console.print(
            "the recogniser knows the emoji of the built-in model and cannot judge this model: only distances to the "
            "dense pictures are reported"
        )
    own = _own_attention(pipe)
    methods = _with_distilled(distilled, lora, asked or own or ([] if lora else showcase()))
    with progress() as track:
        left_out = None if asked or own or lora else console.print
        scores = evaluate(
            pipe, methods, out, prompts=prompts, request=request, batch=batch, dino=dino, track=track,
            left_out=left_out,
        )  # fmt: skip
    if not state.is_main_process:
        return
    Console(width=None if sys.stdout.isatty() else 1000).print(score_table(scores))
    for name in ("scores.json", "sheet.png"):
        print(out / name)


def _opened(
    model: str,
    lora: str,
    prompt: str,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    folder: Path,
    device: str,
    dtype: str,
    **more: Any,
) -> tuple[Any, Any, Any]:
    """Pipeline, distilled method (None without a LoRA of foveate) and request, after the options are checked."""
    check_writable(folder)
    if size:
        from foveate.diffusers.checks import check_size

        check_size(model or str(PIPELINE), read_size(size))
    pipe, distilled = open_with_lora(model, lora, device, dtype)
    if distilled and distilled.size:
        height, width = distilled.size
        if size and read_size(size) != (height, width):
            console.print(
                f"the LoRA was distilled with {width} x {height} px: other sizes may be worse than without it"
            )
        size = size or f"{width}x{height}"
    return pipe, distilled, request_of(pipe, model, prompt, size, steps, guidance, seed, **more)


def open_with_lora(model: str, lora: str, device: str, dtype: str) -> tuple[Any, Any]:
    """The pipeline with its LoRA, and the method that it was distilled for: None without a LoRA of foveate."""
    choose_dtype(dtype, choose_device(device))
    from foveate.diffusers.lora import find_lora, load_lora, read_lora

    file = None
    if lora:
        import_module("peft")  # fails with what to install, which diffusers would not say
        read_lora(file := find_lora(str(LORA) if lora == "built-in" else lora))
    pipe = open_model(model, device, dtype)
    return pipe, load_lora(pipe, file) if file else None


def _claimed(
    folder: Path, suffix: str, requests: Sequence[Any], pipe: Any, settings: dict[str, str]
) -> dict[Path, Any]:
    """The file of each request in a folder that is reserved for these settings."""
    from foveate.diffusers.pipelines import denoiser, fingerprint
    from foveate.utils.files import claim, slug

    shared = {name: text for name, text in settings.items() if name not in ("prompt", "seed", "device")}
    claim(folder, shared | {"weights": fingerprint(denoiser(pipe))})
    # the checksum tells prompts apart that begin alike, whatever else the file of prompts holds
    return {folder / f"{slug(r.prompt)}-{crc32(r.prompt.encode()):08x}-{r.seed}{suffix}": r for r in requests}


def _write(path: Path, drawn: Any, pipe: Any, request: Any, told: dict[str, str], summary: Any) -> None:
    """Write a video, or a picture with what is to be told of it."""
    from foveate.diffusers.pipelines import frame_rate, write_video
    from foveate.utils.files import write_picture

    if path.suffix.lower() == ".mp4":
        return write_video(path, drawn, frame_rate(pipe, request))
    if summary and all(layer.why for layer in summary.layers):
        told["stayed dense"] = summary.layers[0].why
    return write_picture(path, drawn[0], told)


def _suffix(pipe: Any, request: Any) -> str:
    """Suffix of the file with the result; fails if nothing here can write such a file."""
    from foveate.diffusers.pipelines import makes_video

    if not makes_video(pipe) or request.frames == 1:
        return ".png"
    import_module("imageio_ffmpeg")  # fails with what to install
    return ".mp4"


def settings_of(pipe: Any, model: str, request: Any) -> dict[str, str]:
    """The settings that pictures and pages report."""
    from foveate.diffusers.pipelines import frame_rate, makes_video

    more = {"negative prompt": request.negative, "images": ", ".join(map(str, request.images))}
    if makes_video(pipe):
        more |= {"frames": str(request.frames or "the pipeline's own"), "fps": str(frame_rate(pipe, request))}
    return {
        "prompt": request.prompt,
        "model": model or "foveate's built-in model",
        "size": f"{request.size[1]} x {request.size[0]} px",
        "steps": str(request.steps),
        "guidance": "the pipeline's own" if request.guidance is None else str(request.guidance),
        "seed": str(request.seed),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
    } | {name: value for name, value in more.items() if value}


def remark_on(pipe: Any, model: str, prompt: str) -> str:
    """The part of a prompt that the model does not read, and the words that the built-in model does not know."""
    from foveate.demo.text import unknown_words
    from foveate.diffusers.pipelines import unread

    remarks = [f"The model does not read the end of the prompt: {end!r}."] if (end := unread(pipe, prompt)) else []
    words = [
        f"{word!r} (known: {', '.join(nearest)})" if nearest else repr(word)
        for word, nearest in (unknown_words(prompt) if not model else {}).items()
    ]
    if words:
        remarks.append(f"The built-in model was never taught {', '.join(words)}, and can only guess.")
    return " ".join(remarks)


def _method(name: str | None, options: dict[str, str]) -> Method | ComposedMethod | Preset | None:
    if name and (set(name) & set("+:") or is_preset(name)):
        if options and is_preset(name):
            raise ValueError(f"a preset has its options: leave {', '.join(options)} out, or name a method")
        if options:
            raise ValueError(f"write all options into --method {name}, such as hilberta:tiles=16+toma:keep=0.5")
        return read_variant(name)
    if name not in (None, "dense"):
        return method_from_text(name, options)
    if options:
        raise ValueError(
            f"dense takes no options ({', '.join(options)}): name a method, --method {next(iter(METHODS))}"
        )
    return None


def method_with_lora(distilled: Any, name: str | None, options: dict[str, str]) -> Any:
    """The method to draw with: that of the LoRA, if it is one of foveate."""
    if distilled is None:
        return _method(name, options)
    from foveate.diffusers.lora import adapted

    if name is None:
        name = next(name for name, cls in METHODS.items() if isinstance(distilled.method, cls))
    return adapted(distilled, _method(name, options), set(options))


def _own_attention(pipe: Any) -> list[Method]:
    """The log-linear attention of a pixel model as a method; the model itself becomes dense. Empty for others."""
    from foveate.diffusers.pixel_pipeline import PixelPipeline, as_method

    return [as_method(pipe)] if isinstance(pipe, PixelPipeline) else []


def _with_distilled(distilled: Any, lora: str, methods: Sequence[Any]) -> list[Any]:
    """The methods, then the method of the LoRA without and with it."""
    if not lora:
        return [*methods]
    if distilled is None:
        raise ValueError(f"{lora} does not say what it was distilled for: only generate takes LoRAs of another make")
    alone = [] if distilled.method in methods else [distilled.method]
    return [*methods, *alone, distilled]
