# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false
"""One denoising step on several GPUs of one host under Ulysses context parallelism, checked and timed against one GPU.

torchrun --nproc-per-node 2 -m lab.bench.parallel lab/results --model flux-dev --grid 128x128
"""

import argparse
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.apps.bench.models import MODELS
from foveate.methods import LLSA, HilbertA, Method
from foveate.pipelines.lora import using
from foveate.pipelines.parallel import enable_parallelism
from foveate.pipelines.request import denoiser
from foveate.utils.processes import join, leave
from lab.bench.ranks import difference, exchange_share, most_memory, save, slowest

METHODS: tuple[Method | None, ...] = None, HilbertA(tiles=16), LLSA(top_k=16)


def timed(pipe: Any, call: Any, method: Method | None, rounds: int) -> tuple[dict[str, float], torch.Tensor]:
    """Seconds, memory and share of exchanges of a step on this GPU or on all, and its output."""
    torch._dynamo.reset()  # it compiles a block for eight settings at most
    model = denoiser(pipe)
    with using(pipe, method):
        step = partial(model, *call.args, **call.kwargs)
        seconds = slowest(step, rounds, model.device)
        return {
            "s": seconds,
            "peak_bytes": most_memory(step, model.device),
            "exchange_share": exchange_share(step, model.device),
        }, step()[0]


@torch.no_grad()
def main() -> None:
    """Time dense and sparse steps on one GPU and on all GPUs, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the JSON file")
    parser.add_argument("--model", default="flux-dev", choices=[*MODELS])
    parser.add_argument("--grid", default="128x128", help="tokens: ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS")
    parser.add_argument("--layers", type=int, help="layers of a model of which one GPU does not hold all (minimax-h3)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="do not compile the repeated blocks")
    parser.add_argument("--commit", help="commit of this code, where git cannot tell it")
    options, device = parser.parse_args(), join().device
    torch.manual_seed(0)  # the same weights and inputs on every GPU
    model, gpus = MODELS[options.model], dist.get_world_size()
    part = {"layers": options.layers} if model.layers else {}
    pipe = model.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32, **part)
    grid = tuple(map(int, options.grid.split("x")))
    call, network = model.inputs(pipe, grid, model.text), denoiser(pipe)
    config: Any = network.config
    if not options.eager:
        network.compile_repeated_blocks()
    lengths = prod(grid), config.num_attention_heads, model.text or 0
    even = not any(length % gpus for length in lengths)
    about = {
        "what": "one denoising step under Ulysses context parallelism", "model": options.model, "grid": options.grid,
        "compiled": not options.eager, "evenly_divided": even,
    }  # fmt: skip
    if model.layers:
        about |= {"layers": options.layers, "all_layers": model.layers}
    kind, rows = "eager" if options.eager else "compiled", list[dict[str, Any]]()
    file = options.out / f"parallel-{options.model}-{gpus}-{kind}-{device.type}.json"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        alone = [timed(pipe, call, method, options.rounds) for method in METHODS]
        enable_parallelism(network, ulysses_degree=gpus, ulysses_anything=not even)
        for method, (one, want) in zip(METHODS, alone, strict=True):
            all_, got = timed(pipe, call, method, options.rounds)
            times = {f"one_gpu_{name}": value for name, value in one.items() if name != "exchange_share"}
            times |= {f"all_gpus_{name}": value for name, value in all_.items()}
            rows.append({"variant": method.title if method else "dense", **times, "speed_up": one["s"] / all_["s"],
                         "difference": difference(got, want)})  # fmt: skip
            save(file, about, rows, options.commit)
    leave()


if __name__ == "__main__":
    main()
