# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false
"""Time to the first token after a long context that several GPUs divide, checked and timed against one GPU.

torchrun --nproc-per-node 2 -m lab.bench.divided_context lab/results --tokens 8192,32768,65536
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from transformers import AttentionInterface

from foveate.apps.bench.context import MODELS, TOLERANCE, Work, encoder_of_ids, find_encoder
from foveate.apps.bench.context import QuestionWorkload as Workload
from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkEncoder
from foveate.transformers.context import patch_batch
from foveate.utils.processes import join, leave
from lab.bench.ranks import difference, most_memory, save, slowest


def ring_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention function of `transformers` that PyTorch's `context_parallel` turns into ring attention."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))  # it takes no groups
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


AttentionInterface.register("ring", ring_attention)


def full_prefill(work: Work, prompt: Tensor) -> Tensor:
    """Logits of the first token by the model alone."""
    ids = torch.cat([work.encoder.prefix, *(chunk.ids for chunk in work.chunks), prompt])[None]
    return work.encoder.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[0]


def ring_prefill(work: Work, prompt: Tensor, mesh: Any) -> Tensor:
    """The same by ring attention; logits of each process's last token."""
    model, size = work.encoder.model, 2 * mesh.size()
    ids = torch.cat([work.encoder.prefix, *(chunk.ids for chunk in work.chunks), prompt])[None]
    ids = functional.pad(ids, (0, -ids.shape[1] % size), value=1)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    before, model.config._attn_implementation = model.config._attn_implementation, "ring"
    try:
        with context_parallel(
            mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1], no_restore_buffers={ids, positions}
        ):
            return model(input_ids=ids, position_ids=positions, logits_to_keep=1, use_cache=False).logits[0]
    finally:
        model.config._attn_implementation = before


def recomputed(encoder: ChunkEncoder, work: Work, prompt: Tensor, method: RecomputePolicy, cached: bool) -> Tensor:
    """Logits of the first token from chunks, in memory or encoded first."""
    chunks = work.chunks if cached else encoder.encode([chunk.ids.tolist() for chunk in work.chunks])
    patched = patch_batch([encoder.compose(chunks)], [prompt], [method])
    logits = patched.logits(last=1)[0]
    patched.close()
    return logits


@torch.no_grad()
def main() -> None:
    """Time full prefills and recomputed chunks on one GPU and on all GPUs, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the JSON file")
    parser.add_argument("--model", default="llama-8b", choices=[*MODELS])
    parser.add_argument("--tokens", default="8192,32768,65536", help="lengths of the context")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="commit of this code, where git cannot tell it")
    options, device = parser.parse_args(), join().device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = find_encoder(options.model, device, dtype)  # the same weights on every GPU
    all_ = encoder_of_ids(one.model, dist.group.WORLD)
    ours, gpus, rows = InfoFlowKV(recompute=0.15), dist.get_world_size(), list[dict[str, Any]]()
    about = {
        "what": "time to the first token, timing only: random weights", "model": options.model, "chunk": options.chunk,
    }  # fmt: skip
    for tokens in map(int, options.tokens.split(",")):
        alone, divided = (Work(encoder, tokens, Workload(options.chunk)) for encoder in (one, all_))
        (question,) = alone.draw(1, 0)
        want = full_prefill(alone, question.prompt)
        error = difference(recomputed(all_, divided, question.prompt, FullPrefill(), True), want)
        if not error <= TOLERANCE[dtype]:
            raise ValueError(f"recomputing all rows differs from the full prefill by {error:.1e} at {tokens} tokens")
        variants = {
            ("full prefill", 1): partial(full_prefill, alone, question.prompt),
            ("InfoFlow 15%, encoded on the fly", 1): partial(recomputed, one, alone, question.prompt, ours, False),
            ("InfoFlow 15%", 1): partial(recomputed, one, alone, question.prompt, ours, True),
            ("InfoFlow 15%, encoded on the fly", gpus): partial(
                recomputed, all_, divided, question.prompt, ours, False
            ),
            ("InfoFlow 15%", gpus): partial(recomputed, all_, divided, question.prompt, ours, True),
        }
        if device.type == "cuda":
            variants["ring attention, full prefill", gpus] = partial(ring_prefill, alone, question.prompt, mesh)
        errors = {
            "all_recomputed_error": error,
            "change_by_dividing": difference(variants["InfoFlow 15%", gpus](), variants["InfoFlow 15%", 1]()),
        }
        full = slowest(variants["full prefill", 1], options.rounds, device)
        for (variant, count), call in variants.items():
            seconds, peak = slowest(call, options.rounds, device), most_memory(call, device)
            rows.append({"tokens": tokens, "variant": variant, "gpus": count, "first_token_s": seconds,
                         "speed_up": full / seconds, "peak_bytes": peak, **errors})  # fmt: skip
            file = f"divided-context-{options.model}-{gpus}-{device.type}.json"
            save(options.out / file, about, rows, options.commit)
        one.free()
    leave()


if __name__ == "__main__":
    main()
