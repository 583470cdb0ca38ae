"""`foveate ui`: the studio, a page for images and questions."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from foveate.apps.cli import rag
from foveate.apps.cli.common import check_writable, free_port, open_reader
from foveate.apps.cli.methods import method_to_draw
from foveate.apps.cli.pictures import lora_of, open_with_lora, remark_on, request_of, settings_of
from foveate.apps.console import Device, Dtype, clear_errors, console

__all__ = ["commands", "ui"]


@clear_errors
def ui(
    model: Annotated[
        str, typer.Option(help="Hub id or folder of the initial pipeline. [dim]default: the built-in model[/]")
    ] = "",
    lora: Annotated[
        str,
        typer.Option(
            help="Initial LoRA of [bold]foveate distill[/], or built-in or built-in-16 for the built-in model's."
        ),
    ] = "",
    documents: Annotated[
        Path | None,
        typer.Option(
            help="Folder of documents to ask about. [dim]default: sample texts that the built-in reader knows[/]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the images. Nothing in it is overwritten.")] = Path("studio"),
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 takes a free one.")] = 7860,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Open the studio: a page in the browser for dense and sparse images side by side, and questions about documents.

    foveate ui --open

    foveate ui --model black-forest-labs/FLUX.1-schnell --out pictures

    The page offers `foveate generate`, `foveate compare` and `foveate rag`: a slider compares two images, tiles or
    merged tokens are drawn over them, and a click shows where a token attends. Every image is saved with its
    settings. Each browser tab has its own history; all share the model, one at a time.

    Only this machine can open the page unless --host says otherwise. Whoever reaches it can load models and read
    folders here: do not open it to strangers. Needs `pip install 'foveate[ui]'`. Ctrl-C ends it.
    """
    check_writable(out)
    import_module("gradio")  # fails early if packages are missing
    port = free_port(host, port)  # before anything is loaded
    from foveate.apps.demo.examples import write_examples
    from foveate.apps.web.studio import Studio
    from foveate.apps.web.studio_page import serve

    questions: list[str] = []
    if documents is None:
        documents = out / "texts" / "facts"
        questions = list(write_examples(out / "texts", 0)[0])
    studio = Studio(commands(device, dtype), out)
    studio.open(model, lora)
    if host not in ("127.0.0.1", "localhost", "::1"):
        warning = "whoever reaches this machine can use its models and read its folders"
        console.print(Text.assemble((f"--host {host}", "bold"), f": {warning}"))
    serve(studio, model, lora, documents, questions, host=host, port=port, browser=browser, ready=_print_address)


def commands(device: str, dtype: str) -> Any:
    """Functions of the commands for the page, on one device and in one dtype."""
    from foveate.apps.demo import LORAS
    from foveate.apps.web.studio import Commands
    from foveate.methods import options_in

    return Commands(
        open_model=lambda name, lora: open_with_lora(name, lora, device, dtype),
        request=request_of,
        method=lambda distilled, name, options: method_to_draw(
            distilled, None if distilled else name, options_in(options)
        ),
        settings=settings_of,
        remark=remark_on,
        open_reader=lambda name: open_reader(name, device, dtype),
        lora=lambda name: lora_of(name)[1],
        loras=tuple(LORAS),
        recompute=lambda name, fraction, compare: rag.recompute_methods(name, fraction, {}, compare),
    )


def _print_address(address: str) -> None:
    console.print("open the page in a browser; Ctrl-C ends it:")
    print(address, flush=True)
