# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
"""Denoising steps of FLUX.1-dev's size with random weights, to compare two versions of Foveate on one GPU.

PYTHONPATH=OTHER/src python -P lab/bench/flux_steps.py before.json --mode compiled  # a checkout of another commit
PYTHONPATH=src       python -P lab/bench/flux_steps.py now.json    --mode compiled
"""

import argparse
import json
import time
from statistics import median

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

import foveate
from foveate import HilbertA, ToMA

VARIANTS = {"dense": (), "T16": (HilbertA(tiles=16),), "toma": (ToMA(),), "both": (HilbertA(tiles=16), ToMA())}


def random_flux() -> FluxTransformer2DModel:
    """FLUX.1-dev with random weights in bfloat16 on the GPU."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else torch.nn.init.ones_(weight)
    return model


def inputs(side: int) -> dict[str, object]:
    """Arguments of one forward pass with `side` x `side` image tokens and 512 text tokens."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return {
        "hidden_states": torch.randn(1, side * side, 64, **like),
        "encoder_hidden_states": torch.randn(1, 512, 4096, **like),
        "pooled_projections": torch.randn(1, 768, **like),
        "timestep": torch.full((1,), 0.5, **like),
        "guidance": torch.full((1,), 3.5, device="cuda"),
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, side, side, "cuda", torch.bfloat16),
        "txt_ids": torch.zeros(512, 3, **like),
        "return_dict": False,
    }


@torch.no_grad()
def main() -> None:
    """Time every variant and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--sides", default="64,128", help="image tokens along each side; 64 is 1024 px")
    parser.add_argument("--rounds", type=int, default=9)
    options, model, rows = parser.parse_args(), random_flux(), []
    if options.mode == "compiled":
        model.compile_repeated_blocks(fullgraph=True)
    for side in map(int, options.sides.split(",")):
        x = inputs(side)
        for name, methods in VARIANTS.items():
            run = foveate.apply(model, *methods) if methods else None
            taken = []
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                for _ in range(3 + options.rounds):  # three to warm up
                    torch.cuda.synchronize()
                    start, base = time.perf_counter(), torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    model(**x)
                    torch.cuda.synchronize()
                    taken.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated() - base
            rows.append({"pixels": 16 * side, "variant": name, "seconds": median(taken[3:]), "peak_bytes": peak})
            print(rows[-1], flush=True)
            if run:
                run.remove()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "mode": options.mode}
    with open(options.out, "w") as file:
        json.dump({**about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
