"""`foveate generate`: one image or video, or many."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from zlib import crc32

import typer

from foveate.apps.cli.common import Option, Tiles, check_file, check_writable, options_of, read_prompts
from foveate.apps.cli.methods import method_to_draw
from foveate.apps.cli.pictures import (
    Fps,
    Frames,
    Guidance,
    Images,
    Lora,
    Model,
    Negative,
    Size,
    Steps,
    as_measured,
    note_steps,
    open_at_size,
    own_attention,
    remark_on,
    request_of,
    settings_of,
    suffix_of,
)
from foveate.apps.console import Device, Dtype, Seed, brief, clear_errors, console, join_processes, progress
from foveate.apps.errors import noting
from foveate.utils.files import claim, slug, write_whole
from foveate.utils.processes import check_shared, divide

__all__ = ["generate"]


@clear_errors
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt: a description of the image.", show_default=False)
    ] = None,
    model: Model = "",
    size: Size = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="dense, hilberta, toma, llsa, tomesd, tofu, todo; with options, hilberta:tiles=16,centre=0; "
            "combined, hilberta+toma; or a preset of foveate tune. [dim]default: the method of the LoRA, else dense[/]"
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
        int, typer.Option(min=1, max=100_000, help="Images of each prompt, with --seed and the seeds after it.")
    ] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with a prompt a line, in place of one prompt.", show_default=False)
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Divide among several processes: the tokens of each image, or the prompts and seeds. "
            "[dim]default: picture if there is one to generate, else prompts[/]",
            metavar="picture|prompts",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="PNG or MP4 file; with --prompts or --seeds a folder, whose existing images are kept. "
            "[dim]default: named after prompt, seed and method; the folder pictures[/]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Generate one image or video, and print what each attention layer did. A PNG file contains the settings.

    foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048 --method hilberta --tiles 16

    foveate generate "waves at a lighthouse" --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --frames 81

    Many go into a folder: after Ctrl-C or a failure the same command generates the missing ones.

    foveate generate --prompts prompts.txt --seeds 4 --out pictures

    On several GPUs or nodes: the processes share the work on one image, or each generates a part of many.

    torchrun --nproc-per-node 4 -m foveate generate "a lighthouse" --model black-forest-labs/FLUX.1-dev --size 2048

    accelerate launch -m foveate generate --prompts prompts.txt --model black-forest-labs/FLUX.1-dev
    """
    if prompt is not None and prompts is not None:
        raise ValueError(f"a prompt, {brief(prompt)!r}, and --prompts {prompts} are given: leave one of them out")
    if prompt is None and prompts is None:
        raise ValueError('give a prompt, foveate generate "a lighthouse", or a file of prompts with --prompts')
    if split not in (None, "picture", "prompts"):
        raise ValueError(f"unknown --split {split}: several processes divide each image, or the prompts")
    texts, many = read_prompts(prompts) if prompts else [prompt or ""], prompts is not None or seeds > 1
    options = options_of(option, tiles)
    chosen: Any = None if lora else method_to_draw(None, method, options)
    size, steps = as_measured([chosen], size, steps)
    _check_out(out, many, force)
    folder = (out or Path("pictures")) if many else out.parent if out else Path()
    check_writable(folder)
    state, device = join_processes(device)
    pipe, distilled, size = open_at_size(model, lora, size, device, dtype)
    request = request_of(
        pipe, model, texts[0], size, steps, guidance, seed, negative=negative, images=tuple(image or ()),
        frames=frames, fps=fps,
    )  # fmt: skip
    note_steps([chosen], request.steps)
    suffix = suffix_of(pipe, request)
    if out and not many:
        check_file(out, f"{'an MP4' if suffix == '.mp4' else 'a PNG'} file", suffix)
    chosen = method_to_draw(distilled, method, options) if lora else chosen
    if method == "dense":
        own_attention(pipe)  # becomes dense
    together = state.num_processes > 1 and (split or ("prompts" if many else "picture")) == "picture"
    if together:
        from foveate.pipelines.parallel import share_pictures

        share_pictures(pipe, state.num_processes)
    for text in texts:
        if remark := remark_on(pipe, model, text):
            console.print(f"{brief(text)}: {remark}" if many else remark)
    from accelerate.utils import gather_object

    from foveate.diffusers.apply import apply
    from foveate.pipelines.lora import using
    from foveate.pipelines.request import denoiser

    config: Any = denoiser(pipe).config
    plain = config.get("attention", "dense")  # pixel models have their own attention
    about = {"method": repr(chosen.method if distilled else chosen) if chosen else plain}
    about |= {"lora": lora} if lora else {}
    if many:
        requests = [request._replace(prompt=text, seed=seed + i) for text in texts for i in range(seeds)]
        check_shared(folder)
        with state.main_process_first():
            _claim(folder, pipe, settings_of(pipe, model, request) | about)
        files = {folder / _name_among_many(job, suffix): job for job in requests}
        missing = [(path, job) for path, job in files.items() if not path.exists()]
    else:
        files = {out or _unused(request, chosen, suffix, force): request}
        missing = [*files.items()]
    mine, title = divide(missing, together=together), chosen.title if chosen else plain
    if len(mine) < len(missing):
        title += f", part 1 of {state.num_processes}"  # only the first process shows progress
    seconds, summary = list[float](), None
    with (
        progress() as track,
        using(pipe, chosen) if distilled else apply(pipe, chosen) if chosen else nullcontext() as run,
    ):
        advance = track(title, len(mine) if many else request.steps)
        for path, job in mine:
            settings = settings_of(pipe, model, job) | about if state.is_main_process or not together else None
            taken, summary = _draw(pipe, job, run, (lambda: None) if many else advance, path, settings)
            seconds.append(taken)
            if many:
                advance()
    seconds = gather_object(seconds)
    if not state.is_main_process:
        return
    if summary is not None:
        print(summary)
    if not many:
        console.print(f"generated in {seconds[0]:.1f} s")
        print(*files)
        return
    if missing:
        console.print(f"{len(missing)} generated, {median(seconds):.1f} s each")
    index = {path.name: {"prompt": job.prompt, "seed": job.seed} for path, job in files.items()}
    write_whole(folder / "pictures.json", json.dumps(index, indent=2, ensure_ascii=False).encode())
    print(folder)


def _check_out(out: Path | None, many: bool, force: bool) -> None:
    """Refuse an `--out` of the wrong kind, or an existing file."""
    if out is None:
        return
    if many and out.suffix.lower() in (".png", ".mp4"):
        raise ValueError(f"--out names the folder of many images, not {out}: leave {out.suffix} out")
    if not many and out.suffix.lower() != ".mp4":
        check_file(out, "a PNG or MP4 file", ".png")
    if not many and out.exists() and not force:
        raise ValueError(f"{out} exists: name another --out, or overwrite it with --force")


def _unused(request: Any, method: Any, suffix: str, force: bool) -> Path:
    """First free file name for prompt, seed and method: "owl-0.png", "owl-0-2.png", ..."""
    name = f"{slug(request.prompt)}-{request.seed}{'-' + slug(method.title) if method else ''}"
    numbered = (Path(f"{name}{f'-{i}' if i else ''}{suffix}") for i in chain([0], count(2)))
    return next(path for path in numbered if force or not path.exists())


def _name_among_many(request: Any, suffix: str) -> str:
    """File name of an image among many; a checksum distinguishes prompts with the same beginning."""
    return f"{slug(request.prompt)}-{crc32(request.prompt.encode()):08x}-{request.seed}{suffix}"


def _claim(folder: Path, pipe: Any, settings: dict[str, str]) -> None:
    """Reserve a folder for images of these settings and weights."""
    from foveate.pipelines.request import denoiser, fingerprint

    shared = {name: text for name, text in settings.items() if name not in ("prompt", "seed", "device")}
    claim(folder, shared | {"weights": fingerprint(denoiser(pipe))})


def _draw(
    pipe: Any, request: Any, run: Any, on_step: Callable[[], None], path: Path, settings: dict[str, str] | None
) -> tuple[float, Any]:
    """Generate an image or video into a file; return the seconds, and what each layer did if not dense.

    Without settings nothing is written: another process does.
    """
    from foveate.pipelines.image_files import write_picture
    from foveate.pipelines.request import draw, frame_rate, write_video

    began = time.perf_counter()
    with noting(f"generating {brief(request.prompt)!r} with seed {request.seed}"):
        frames = draw(pipe, request, on_step)
    seconds, summary = time.perf_counter() - began, run.summary() if run else None
    if settings is None:
        return seconds, summary
    if path.suffix.lower() == ".mp4":
        write_video(path, frames, frame_rate(pipe, request))
    else:
        settings |= {"seconds": f"{seconds:.1f}"}
        settings |= (
            {"stayed dense": summary.layers[0].why} if summary and all(one.why for one in summary.layers) else {}
        )
        write_picture(path, frames[0], settings)
    return seconds, summary
