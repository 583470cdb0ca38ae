"""What the commands share: progress and clear errors out, options that mean the same everywhere."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foveate.demo import LORA, PIPELINE, READER
from foveate.methods import ComposedMethod, Method, method_from_text
from foveate.utils.progress import Track

__all__ = [
    "Device",
    "Dtype",
    "Guidance",
    "Lora",
    "Model",
    "Seed",
    "Size",
    "Steps",
    "check_size",
    "check_writable",
    "clear_errors",
    "console",
    "lora_of",
    "open_model",
    "open_reader",
    "options_of",
    "progress",
    "read_method",
    "read_size",
    "remark_on",
    "request_of",
    "say_unknown",
    "settings_of",
    "size_with",
    "training_device",
]

console = Console(stderr=True, highlight=False)

EXTRAS = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "accelerate": "diffusers,train",
    "peft": "diffusers,train",
}
"""What to install for packages that not all commands need."""

Model = Annotated[
    str,
    typer.Option(help="Hub id or folder of a diffusers pipeline. Left out: the built-in model, which draws emoji."),
]
Size = Annotated[
    str | None,
    typer.Option(
        help="Pixels: 1024, or WIDTHxHEIGHT. [dim]default: built-in 128 on a CPU, 256 on a GPU; else 1024[/]"
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="Denoising steps. [dim]default: 20 for the built-in model, else 28[/]"),
]
Guidance = Annotated[
    float | None, typer.Option(min=0, max=1000, help="Guidance scale. [dim]default: the pipeline's[/]")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the first noise: the same seed, the same picture.")]
Lora = Annotated[
    str,
    typer.Option(
        help="LoRA of [bold]foveate distill[/]: file, folder or hub id; built-in is the one of the built-in model. "
        "Its method and its size come with it."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """One line and exit code 2 for what a user can mend; 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            console.print("stopped; what was finished is in place")
            raise typer.Exit(130) from None
        except (ValueError, ImportError, OSError) as error:
            _fail(_missing(error) or str(error).strip())
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            _fail("out of memory: use a smaller --size (or --top), --dtype bfloat16, or a device with more memory")

    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")  # paragraphs fill any terminal
    return run


def _missing(error: Exception) -> str:
    """What to install, if it is that."""
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = EXTRAS.get(package)
    return f"this needs {package}: pip install 'foveate[{extra}]'" if extra else ""


def _fail(message: str) -> None:
    first_line = message.splitlines()[0] if message else "something failed without saying what"
    console.print(f"[bold red]error:[/] {escape(first_line)}", soft_wrap=True)
    raise typer.Exit(2)


def _out_of_memory(error: Exception) -> bool:
    known = "can't allocate memory", "not enough memory"  # what the CPU allocators say
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in known)


def open_model(model: str, device: str, dtype: str) -> Any:
    """The pipeline that `--model` names, or the built-in one."""
    console.print(f"loading {model or 'the built-in model'}")
    from diffusers.utils import logging as diffusers_says
    from transformers.utils import logging as transformers_says

    from foveate.diffusers.pipelines import load

    diffusers_says.set_verbosity_error()
    diffusers_says.disable_progress_bar()
    transformers_says.disable_progress_bar()
    try:
        return load(model or str(PIPELINE), device, dtype)
    except ValueError as error:
        if model or "cannot load" not in str(error):
            raise
        raise ValueError(f"{error}: the built-in model is damaged, install foveate again") from error


def open_reader(model: str, device: str, dtype: str) -> tuple[Any, Any]:
    """The language model that `--model` names, or the built-in one, and its tokenizer."""
    if not model and not READER.is_dir():
        raise ValueError("no language model comes with this version: name one with --model, a folder or a hub id")
    console.print(f"loading {model or 'the built-in reader'}")
    from transformers.utils import logging as transformers_says

    from foveate.transformers.model import load

    transformers_says.set_verbosity_error()
    transformers_says.disable_progress_bar()
    return load(model or str(READER), device, dtype)


def say_unknown(model: str, tokenizer: Any, text: str) -> None:
    """Name the words that the language model cannot know: its answer is a guess then."""
    from foveate.transformers.model import unknown_words

    if not (words := unknown_words(tokenizer, text)):
        return
    more = f" and {len(words) - 8} more" if len(words) > 8 else ""
    remedy = "" if model else "; it knows a few hundred, see docs/built-in-reader.md, and --model names another one"
    console.print(f"the model does not know the words {escape(', '.join(words[:8]))}{more}: it will guess{remedy}")


def training_device(name: str) -> str:
    """Where this process trains; processes but the first are silent."""
    if name not in ("auto", "cpu"):
        raise ValueError(f"--device is auto or cpu here, not {name}: CUDA_VISIBLE_DEVICES says which GPUs there are")
    from accelerate import PartialState

    state = PartialState(cpu=name == "cpu")
    console.quiet = not state.is_main_process
    if state.num_processes > 1:
        console.print(f"on {state.num_processes} devices")
    return str(state.device)


def lora_of(pipe: Any, lora: str) -> Any:
    """Put the LoRA into the pipeline; with the method it was distilled for, or None if it is of another make."""
    if not lora:
        return None
    import_module("peft")  # diffusers would not say what to install

    from foveate.diffusers.lora import find_lora, load_lora

    return load_lora(pipe, find_lora(str(LORA) if lora == "built-in" else lora))


def size_with(distilled: Any, size: str | None) -> str | None:
    """The size that was asked for, else that of the pictures that a LoRA was distilled with; says if they differ."""
    if distilled is None or distilled.size is None:
        return size
    height, width = distilled.size
    if size and read_size(size) != (height, width):
        console.print(f"the LoRA was distilled with {width} x {height} px: other sizes may be worse than without it")
    return size or f"{width}x{height}"


def request_of(
    pipe: Any, model: str, prompt: str, size: str | None, steps: int | None, guidance: float | None, seed: int
) -> Any:
    """What to draw, checked, with the model's own defaults for what was left out."""
    from foveate.diffusers.pipelines import Request, check_request

    usual = ("128" if pipe.device.type == "cpu" else "256") if not model else "1024"
    if "width" in pipe.config:  # of a pixel model
        usual = f"{pipe.config.width}x{pipe.config.height}"
    pixels = read_size(size or usual)
    request = Request(prompt, pixels, steps or (28 if model else 20), guidance, seed)
    check_request(pipe, request)
    return request


def settings_of(pipe: Any, model: str, request: Any) -> dict[str, str]:
    """What pictures and pages say about how they were drawn."""
    return {
        "prompt": request.prompt,
        "model": model or "foveate's built-in model",
        "size": f"{request.size[1]} x {request.size[0]} px",
        "steps": str(request.steps),
        "guidance": "the pipeline's own" if request.guidance is None else str(request.guidance),
        "seed": str(request.seed),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
    }


def options_of(option: list[str] | None, tiles: str | None = None) -> dict[str, str]:
    """The options of a method: of "centre=0" and the like, and its tiles."""
    if bare := [text for text in option or [] if "=" not in text]:
        raise ValueError(f"option {bare[0]} has no value: write -o {bare[0]}=VALUE")
    pairs = {name: value for name, _, value in (text.partition("=") for text in option or [])}
    return pairs if tiles is None else {**pairs, "tiles": tiles}


def read_method(text: str) -> Method | ComposedMethod:
    """The method of "hilberta:tiles=16,centre=0", or the methods of "hilberta:tiles=16+toma:keep=0.5,tile=(8,8)"."""
    comma = r",(?![^(]*\))"  # not one within parentheses
    methods = tuple(
        method_from_text(name, options_of(re.split(comma, options) if options else None))
        for name, _, options in (part.partition(":") for part in text.split("+"))
    )
    return methods[0] if len(methods) == 1 else ComposedMethod(methods)


def remark_on(pipe: Any, model: str, prompt: str) -> str:
    """What of a prompt the model does not read, and which of its words the built-in model was never taught."""
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


def check_size(size: str | None) -> None:
    """Refuse what cannot be read, before a model is loaded."""
    if size:
        read_size(size)


def check_writable(folder: Path) -> None:
    """Refuse a folder that nothing can be written into, before hours of work."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"cannot write into {folder}: name another --out")


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of "1024" or "1024x768"."""
    match = re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", text.strip().lower())
    if not match:
        raise ValueError(f"cannot read the size {text!r}: write 1024, or WIDTHxHEIGHT such as 1024x768")
    return int(match[2] or match[1]), int(match[1])


@contextmanager
def progress() -> Generator[Track]:
    """Starts progress bars: called with a name and a length, what it yields returns what advances the bar by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:

        def track(name: str, length: int) -> Callable[[], None]:
            task = bars.add_task(name, total=length)
            return lambda: bars.advance(task)

        yield track
