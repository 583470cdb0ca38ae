# pyright: basic, reportPrivateImportUsage=false
"""Soak test: threads share a model under changing methods, caches, sizes and errors; each image must be as if alone.

python -m lab.bench.soak lab/results/soak-cpu.json --minutes 20       # a CPU is enough
"""

import argparse
import copy
import itertools
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers import FirstBlockCacheConfig, FluxPipeline
from torch import Tensor

import foveate
from foveate import HilbertA, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.utils.device import versions

METHODS = {
    "dense": (),
    "HilbertA": (HilbertA(tiles=4, start_percent=0.25),),
    "ToMA": (ToMA(keep=0.5, skip=0),),
    "both": (HilbertA(tiles=4), ToMA(keep=0.5, skip=0, start_percent=0.25)),
}
SIZES = (64, 64), (64, 96), (96, 64)
SEEDS, STEPS, THREADS = range(3), 4, 3
ROUNDING = 1e-5  # of products of matrices on a CPU with several threads; a wrong plan is 1e-2 off


class Failure(Exception):
    """An error that the soak test raises in the middle of an image."""


def share(pipe: FluxPipeline) -> FluxPipeline:
    """A pipeline over the same models, with a scheduler of its own."""
    other = FluxPipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)})  # type: ignore[arg-type]
    other.set_progress_bar_config(disable=True)
    return other


@torch.no_grad()
def generate(pipe: Any, prompt: dict[str, Any], size: tuple[int, int], seed: int, fails: bool = False) -> Tensor:
    """Latents of an image; if it fails, a RuntimeError is raised in the middle of a forward pass."""
    height, width = size

    def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if fails and step == 1:
            tensors["prompt_embeds"] = tensors["prompt_embeds"][..., 1:]  # the next pass raises
        return tensors

    options: dict[str, Any] = {
        "callback_on_step_end_tensor_inputs": ["prompt_embeds"],
        "callback_on_step_end": interrupt,
    }
    return pipe(
        **prompt, height=height, width=width, num_inference_steps=STEPS,
        output_type="latent", generator=torch.Generator().manual_seed(seed), **(options if fails else {}),
    ).images  # fmt: skip


def soak(minutes: float, seed: int = 0) -> dict[str, Any]:
    """Counts of images, wrong images and errors, and the memory of the process over time."""
    chance, counts = random.Random(seed), Counter[str](wrong=0)
    options: dict[str, Any] = {"layers": 2, "single_layers": 4, "heads": 2, "rope": (4, 6, 6), "text_dim": 32}
    model, alone = (untrained_pipeline(**options, text_layers=1) for _ in range(2))
    for pipe in (model, alone):
        pipe.to(torch.float64)  # rounding would now and then choose another token to keep
    with torch.no_grad():  # once: tokenizers of Hugging Face are not made for several threads
        words, pooled, _ = model.encode_prompt("a lighthouse", None, max_sequence_length=16)
    prompt = {"prompt_embeds": words, "pooled_prompt_embeds": pooled}
    pipes, alone = [share(model) for _ in range(THREADS)], share(alone)
    process, memory, wanted = psutil.Process(), [], {}
    start = time.perf_counter()

    def want(method: str, cached: bool, size: tuple[int, int], seed: int) -> Tensor:
        key = method, cached, size, seed
        if key not in wanted:
            if cached:
                alone.transformer.enable_cache(FirstBlockCacheConfig(0.5))
            with foveate.apply(alone, *METHODS[method]) if METHODS[method] else nullcontext():
                wanted[key] = generate(alone, prompt, size, seed)
            if cached:
                alone.transformer.disable_cache()
        return wanted[key]

    while time.perf_counter() - start < 60 * minutes:
        method, cached = chance.choice(list(METHODS)), chance.random() < 0.25
        jobs = [[(chance.choice(SIZES), chance.choice(SEEDS), chance.random() < 0.2) for _ in range(3)] for _ in pipes]
        if cached:  # diffusers keeps one state for all callers of a cache
            jobs = [[(size, seed, False) for size, seed, _ in jobs[0]]]
            pipes[0].transformer.enable_cache(FirstBlockCacheConfig(0.5))

        def work(pipe: Any, images: list[Any], method: str = method, cached: bool = cached) -> Counter[str]:
            found = Counter[str]()
            for size, seed, fails in images:
                try:
                    image = generate(pipe, prompt, size, seed, fails)
                except RuntimeError:
                    found["errors raised"] += 1
                    continue
                found["images"] += 1
                error = (image - wanted[method, cached, size, seed]).abs().max()
                found["wrong"] += bool(error > ROUNDING)
            return found

        for size, seed, fails in itertools.chain(*jobs):
            if not fails:
                want(method, cached, size, seed)
        applied = foveate.apply(chance.choice(pipes), *METHODS[method]) if METHODS[method] else nullcontext()
        with applied, ThreadPoolExecutor(len(jobs)) as pool:
            for found in pool.map(work, pipes, jobs):
                counts.update(found)
        if cached:
            pipes[0].transformer.disable_cache()
        counts["rounds"] += 1
        memory.append((time.perf_counter() - start, process.memory_info().rss / 2**20))
    later = [used for at, used in memory if at > 0.25 * memory[-1][0]]
    half = len(later) // 2
    return {
        "versions": versions(),
        "minutes": minutes,
        "threads": THREADS,
        **counts,
        "memory_mb_third_quarter": max(later[:half]),
        "memory_mb_last_quarter": max(later[half:]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file of the result")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = soak(args.minutes, args.seed)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if result["wrong"] or result["memory_mb_last_quarter"] > 1.02 * result["memory_mb_third_quarter"] + 5:
        raise SystemExit("wrong images, or growing memory")
