"""Options of the commands that generate, loading of a pipeline and its LoRA, the request, and its settings."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.apps.cli.common import read_size
from foveate.apps.console import brief, console
from foveate.apps.demo import LORAS, MODELS, find

MOST_WORDS = 8  # unknown words that a remark names

Model = Annotated[
    str,
    typer.Option(
        help="Hub id or folder of a diffusers pipeline, or built-in-pixel or built-in-video for the built-in models "
        "of pixels and of videos. [dim]default: the built-in model, which generates emoji[/]"
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        help="Size in pixels: 1024, or WIDTHxHEIGHT. "
        "[dim]default: the model's own; built-in models generate smaller on a CPU, such as 128 instead of 256[/]"
    ),
]
Lora = Annotated[
    str,
    typer.Option(
        help="LoRA of [bold]foveate distill[/]: a file, folder or hub id, or built-in or built-in-16 for the built-in "
        "model's LoRAs, with 4 and 16 tiles. It brings its method and its size."
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="Denoising steps. [dim]default: 28; for the built-in models 20[/]"),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1000,
        help="Guidance scale. With --negative, and in models without a guidance input, every step runs the model "
        "twice. [dim]default: the pipeline's; for built-in-video 3[/]",
    ),
]
Negative = Annotated[
    str | None, typer.Option(help="Negative prompt: what not to generate. It needs a guidance scale above 1.")
]
Frames = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100_000,
        help="Frames of a video: a multiple of the model's temporal compression plus 1, such as 81 for Wan. 1 is an "
        "image. [dim]default: the pipeline's; for built-in-video 17[/]",
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
        help="Image to start from: the first frame of a video, or a reference to edit. Repeat the option for "
        "more references. Give --size the proportions of the first frame.",
    ),
]


def open_model(model: str, device: str, dtype: str) -> Any:
    """Load the pipeline of `--model`."""
    from foveate.utils.device import choose_device, choose_dtype

    choose_dtype(dtype, choose_device(device))  # before anything is loaded
    console.print(f"loading {model or 'the built-in model'}")
    from foveate.pipelines.request import load_pipeline, quiet

    quiet()
    try:
        return load_pipeline(place_of(model), device, dtype)
    except ValueError as error:
        if model not in MODELS or "cannot load" not in str(error):
            raise
        raise ValueError(f"{error}: the built-in model is damaged, install foveate-models again") from error


def place_of(model: str) -> str:
    """Folder or hub id of `--model`."""
    return str(MODELS[model].folder) if model in MODELS else model


def open_with_lora(model: str, lora: str, device: str, dtype: str) -> tuple[Any, Any]:
    """Load the pipeline with its LoRA; also returns the LoRA's method, None without a LoRA of foveate."""
    from foveate.pipelines.lora import load_lora
    from foveate.utils.device import choose_device, choose_dtype

    choose_dtype(dtype, choose_device(device))

    file, _ = lora_of(lora)  # before the model is loaded
    pipe = open_model(model, device, dtype)
    return pipe, load_lora(pipe, file) if file else None


def open_at_size(model: str, lora: str, size: str | None, device: str, dtype: str) -> tuple[Any, Any, str | None]:
    """See `open_with_lora`; also returns the size: `--size`, which is checked first, else the LoRA's, or None."""
    if size:
        from foveate.pipelines.checks import check_size

        check_size(place_of(model), read_size(size))
    pipe, distilled = open_with_lora(model, lora, device, dtype)
    if not (distilled and distilled.size):
        return pipe, distilled, size
    height, width = distilled.size
    if size and read_size(size) != (height, width):
        console.print(f"the LoRA was distilled with {width} x {height} px: other sizes may be worse than without it")
    return pipe, distilled, size or f"{width}x{height}"


def lora_of(lora: str) -> tuple[Path | None, Any]:
    """File of `--lora` and the method that it was distilled for; None if there is no LoRA, or no method in it."""
    if not lora:
        return None, None
    import_module("peft")  # fails with what to install, which diffusers would not say
    from foveate.pipelines.lora import find_lora, read_lora

    file = find_lora(str(find(LORAS[lora])) if lora in LORAS else lora)
    return file, read_lora(file)


def size_of(model: str, device: str) -> tuple[int, int] | None:
    """Default (height, width) of a built-in model on a type of device; None for other models."""
    if model not in MODELS:
        return None
    side = MODELS[model].sides[device == "cpu"]
    return side, side


def request_of(
    pipe: Any,
    model: str,
    prompt: str,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    **more: Any,
) -> Any:
    """Validated request, with the model's defaults in place of None; `more` are further fields."""
    from foveate.pipelines.checks import check_request
    from foveate.pipelines.request import Request, arguments, makes_video, own_size

    known = MODELS.get(model)
    sides = read_size(size) if size else size_of(model, pipe.device.type) or own_size(pipe)
    if makes_video(pipe):
        more["frames"] = more.get("frames") or (known and known.frames) or arguments(pipe)["num_frames"]
    guidance = known.guidance if known and guidance is None else guidance
    request = Request(prompt, sides, steps or (20 if known else 28), guidance, seed, **more)
    check_request(pipe, request)
    return request


def suffix_of(pipe: Any, request: Any) -> str:
    """Suffix of the output file; fails if packages to write it are missing."""
    from foveate.pipelines.request import makes_video

    if not makes_video(pipe) or request.frames == 1:
        return ".png"
    import_module("imageio_ffmpeg")  # fails with what to install
    return ".mp4"


def settings_of(pipe: Any, model: str, request: Any) -> dict[str, str]:
    """Settings for the metadata of images and for pages."""
    from foveate.pipelines.request import frame_rate, makes_video
    from foveate.utils.device import dtype_name

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
        "dtype": dtype_name(pipe.dtype),
    } | {name: value for name, value in more.items() if value}


def remark_on(pipe: Any, model: str, prompt: str) -> str:
    """Warning about the unread end of a prompt, and about words unknown to the built-in model; may be empty."""
    from foveate.apps.demo.text import unknown_words
    from foveate.pipelines.request import unread

    remarks: list[str] = []
    if end := unread(pipe, prompt):
        remarks.append(f"The model does not read the end of the prompt: {brief(end)!r}.")
    words = [
        f"{word!r} (known: {', '.join(nearest)})" if nearest else repr(word)
        for word, nearest in (unknown_words(prompt, MODELS[model].words) if model in MODELS else {}).items()
    ]
    if words:
        more = [f"and {len(words) - MOST_WORDS} more words"] if len(words) > MOST_WORDS else []
        named = ", ".join([*words[:MOST_WORDS], *more])
        remarks.append(f"The built-in model was never taught {named}, and can only guess.")
    return " ".join(remarks)


def as_measured(methods: Sequence[Any], size: str | None, steps: int | None) -> tuple[str | None, int | None]:
    """Size and steps of a command: those that were given, else those at which its first preset was measured."""
    for preset in _presets(methods):
        return size or f"{preset.size[1]}x{preset.size[0]}", steps or preset.steps
    return size, steps


def note_steps(methods: Sequence[Any], steps: int) -> None:
    """Print which presets were measured at another number of steps."""
    for preset in _presets(methods):
        if preset.steps not in (None, steps):
            console.print(f"the preset {preset.title} was measured at {preset.steps} steps, not at {steps}")


def _presets(methods: Sequence[Any]) -> list[Any]:
    from foveate.diffusers.preset import Preset

    return [method for method in methods if isinstance(method, Preset)]


def own_attention(pipe: Any) -> list[Any]:
    """List with a pixel model's log-linear attention as a method; the model becomes dense. Empty for other models."""
    from foveate.pipelines.pixel import PixelPipeline, as_method

    return [as_method(pipe)] if isinstance(pipe, PixelPipeline) else []


def with_distilled(distilled: Any, lora: str, methods: Sequence[Any]) -> list[Any]:
    """The methods, then the LoRA's method without and with the LoRA."""
    if not lora:
        return [*methods]
    if distilled is None:
        raise ValueError(f"{lora} does not name its method: only generate takes LoRAs that foveate did not make")
    alone = [] if distilled.method in methods else [distilled.method]
    return [*methods, *alone, distilled]
