"""`foveate serve`: images over HTTP."""

from contextlib import suppress
from importlib import import_module
from signal import SIGTERM, default_int_handler, signal
from typing import Annotated, Any

import typer

from foveate.apps.cli.common import free_port
from foveate.apps.cli.methods import check_distinct, method_to_draw, usual_method
from foveate.apps.cli.pictures import Lora, Model, lora_of, note_steps, place_of, size_of
from foveate.apps.console import Device, Dtype, clear_errors, console

__all__ = [
    "Host",
    "MaxReplicas",
    "Origins",
    "Port",
    "Replicas",
    "Timeout",
    "listen",
    "scale_of",
    "serve",
]

Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on. 0.0.0.0 lets other machines in; they must send the API key that "
        "FOVEATE_API_KEY holds."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 takes a free one.")]
Replicas = Annotated[
    int,
    typer.Option(min=1, help="Number of replicas; each holds the model, one per GPU if there are GPUs."),
]
MaxReplicas = Annotated[
    int,
    typer.Option(
        min=0,
        help="Largest number of replicas: more are started while requests wait. [dim]default: --replicas[/]",
        show_default=False,
    ),
]
Address = Annotated[
    str, typer.Option(help="Address of a Ray cluster, or auto. [dim]default: Ray is started on this machine[/]")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Deadline of a request in seconds; later it gets status 504.")]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors",
        help="Origin of web pages that may use the service, such as https://example.org; * lets all. Repeat it to "
        "name more.",
    ),
]


@clear_errors
def serve(
    model: Model = "",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, a method with options (hilberta:tiles=16), several (hilberta:tiles=16+toma), or a preset. "
            "Repeat it to serve more; requests name one, and the first is the default. [dim]default: dense[/]"
        ),
    ] = None,
    lora: Lora = "",
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = 0,
    steps: Annotated[int, typer.Option(min=1, help="Default number of denoising steps.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Largest batch of images of one size.")] = 4,
    queue: Annotated[
        int, typer.Option(min=1, help="Longest queue of a method; further requests get status 429.")
    ] = 64,
    max_side: Annotated[int, typer.Option(min=1, help="Largest width and height in pixels.")] = 2048,
    max_steps: Annotated[int, typer.Option(min=1, help="Largest number of denoising steps.")] = 100,
    max_n: Annotated[int, typer.Option(min=1, help="Largest number of images in a request.")] = 4,
    timeout: Timeout = 300.0,
    address: Address = "",
    cors: Origins = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve images over HTTP, as OpenAI's API defines it, from replicas on Ray Serve.

    foveate serve --method dense --method toma --replicas 2

    foveate serve --model black-forest-labs/FLUX.1-dev --method hilberta:tiles=16 --max-replicas 8

    POST /v1/images/generations takes prompt, n, size, seed, steps, method and response_format; /docs describes it,
    /health and /metrics watch it. Every replica holds one pipeline with one method, one per GPU if there are GPUs;
    --replicas is the number for each method. Requests of one size and number of steps share a batch; if a replica
    dies, another one takes over. Needs `pip install 'foveate[diffusers,serve]'`. Ctrl-C ends it.
    """
    import_module("ray.serve")  # fails with what to install
    from foveate.apps.serve.http import api_key
    from foveate.apps.serve.image_replicas import ImageReplica
    from foveate.apps.serve.images import ImageFront, Limits
    from foveate.apps.serve.replicas import running
    from foveate.utils.device import choose_device, choose_dtype

    key = api_key(host)
    if steps > max_steps:
        raise ValueError(f"--steps {steps} is more than --max-steps {max_steps}: raise --max-steps")
    file, distilled = lora_of(lora)
    names = method or [usual_method(distilled)]
    chosen = [method_to_draw(distilled, name, {}) for name in names]
    check_distinct(names, chosen)
    note_steps(chosen, steps)
    methods = dict(zip(names, chosen, strict=True))
    gpu = device.startswith("cuda") if address else choose_device(device).type == "cuda"
    if not address:
        choose_dtype(dtype, choose_device(device))
    scale = scale_of(replicas, max_replicas, kinds=len(methods), gpus=gpu and not address)
    port = free_port(host, port)
    console.print(f"loading {model or 'the built-in model'}")
    where = place_of(model)
    name = model or "built-in"
    shared = {
        "model": where, "lora": file, "size": size_of(model, "cuda" if gpu else "cpu"), "batch": batch,
        "timeout": timeout, "device": "cuda" if gpu else device, "dtype": dtype,
    }  # fmt: skip
    served = {
        called: shared | {"method": one, "about": {"model": name, "method": called}} for called, one in methods.items()
    }
    limits = Limits(
        steps=steps, max_side=max_side, max_steps=max_steps, max_n=max_n, timeout=timeout, origins=cors or ()
    )
    started = running(ImageReplica, served, batch=batch, queue=queue, replicas=scale, address=address, gpu=gpu)
    with started as handles:
        listen(ImageFront(name, key, limits, handles).app(), host, port)


def scale_of(replicas: int, max_replicas: int, *, kinds: int, gpus: bool) -> tuple[int, int]:
    """Initial and largest number of replicas of each method.

    Args:
        replicas: Value of `--replicas`.
        max_replicas: Value of `--max-replicas`.
        kinds: Number of methods that the service offers; each has its own replicas.
        gpus: Whether each replica needs a GPU of this machine.
    """
    import torch

    if max_replicas and max_replicas < replicas:
        raise ValueError(f"--max-replicas {max_replicas} is less than --replicas {replicas}: leave one of them out")
    if gpus and (needed := replicas * kinds) > (found := torch.cuda.device_count()):
        raise ValueError(f"{needed} replicas need a GPU each, and this machine has {found}: start fewer")
    return replicas, max_replicas or replicas


def listen(app: Any, host: str, port: int) -> None:
    """Serve an application and print its address, until Ctrl-C or SIGTERM."""
    from foveate.apps.serve.server import Server

    def ready() -> None:
        console.print("ready; /docs describes it, Ctrl-C ends it:")
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    signal(SIGTERM, default_int_handler)  # uvicorn ends in order, and then calls this
    with suppress(KeyboardInterrupt):
        Server(app, host, port, ready).run()
