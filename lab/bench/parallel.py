# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
"""One denoising step on several GPUs of one host under Ulysses context parallelism, checked and timed against one GPU.

torchrun --nproc-per-node 2 -m lab.bench.parallel lab/results --model flux-dev --grid 128x128
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.apps.bench.models import MODELS
from foveate.methods import HilbertA, Method
from foveate.pipelines.lora import using
from foveate.pipelines.request import denoiser
from foveate.utils.device import versions
from foveate.utils.timing import now

METHODS: tuple[Method | None, ...] = (None, HilbertA(tiles=16))


def timed(pipe: Any, call: Any, method: Method | None, rounds: int) -> tuple[float, torch.Tensor]:
    """Median seconds of a step on this GPU, and its output."""
    device, taken = denoiser(pipe).device, []
    with using(pipe, method):
        for _ in range(2 + rounds):  # two to compile and warm up
            dist.barrier()
            torch.cuda.synchronize()
            began = now(device)
            out = denoiser(pipe)(*call.args, **call.kwargs)[0]
            taken.append(now(device) - began)
    return median(taken[2:]), out


@torch.no_grad()
def main() -> None:
    """Time dense and sparse steps on one GPU and on all GPUs, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the JSON file")
    parser.add_argument("--model", default="flux-dev", choices=[*MODELS])
    parser.add_argument("--grid", default="128x128", help="tokens: ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="do not compile the repeated blocks")
    parser.add_argument("--commit", help="commit of this code, where git cannot tell it")
    options, rank = parser.parse_args(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)  # the same weights and inputs on every GPU
    model = MODELS[options.model]
    pipe = model.build(torch.device("cuda", rank), torch.bfloat16)
    call = model.inputs(pipe, tuple(map(int, options.grid.split("x"))), model.text)
    if not options.eager:
        denoiser(pipe).compile_repeated_blocks()
    rows = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        alone = [timed(pipe, call, method, options.rounds) for method in METHODS]
        denoiser(pipe).enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
        together = [timed(pipe, call, method, options.rounds) for method in METHODS]
    for method, (one, want), (all_, got) in zip(METHODS, alone, together, strict=True):
        rows.append({
            "variant": method.title if method else "dense",
            "one_gpu_s": one,
            "all_gpus_s": all_,
            "speed_up": one / all_,
            "difference": ((got - want).float().norm() / want.float().norm()).item(),
        })  # fmt: skip
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        about = {
            "what": "one denoising step under Ulysses context parallelism", "model": options.model,
            "grid": options.grid, "gpus": dist.get_world_size(), "compiled": not options.eager,
            "versions": versions() | ({"commit": options.commit} if options.commit else {}),
        }  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        kind = "eager" if options.eager else "compiled"
        file = options.out / f"parallel-{options.model}-{dist.get_world_size()}-{kind}-cuda.json"
        file.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
