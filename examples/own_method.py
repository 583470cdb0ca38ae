"""A method of your own: image blocks read the text, themselves and every n-th image block, another n-th in each layer.

python examples/own_method.py "an owl above a castle" --stride 4
"""

import argparse
from dataclasses import dataclass
from functools import lru_cache

import torch
from diffusers import FluxPipeline

import foveate
from foveate.methods.base import AttentionPlan, DenseFallback, SparseAttention
from foveate.ops.block_table import block_starts, block_table
from foveate.ops.curves import raster_order
from foveate_models import find


@dataclass(frozen=True, kw_only=True)
class Strided(SparseAttention):
    """Attention to every `stride`-th image block. A stride of 1 is exactly the dense model."""

    stride: int = 4

    def plan(self, grids, text, *, device="cpu"):
        """The order of the tokens of one image size, and the tables of consecutive layers."""
        if len(grids) > 1:
            raise DenseFallback("Strided does not take reference images")
        cells, order = grids[0][0] * grids[0][1], raster_order(*grids[0], device=device)
        title, skipped = f"Strided {self.stride}", 1 - 1 / self.stride
        return AttentionPlan((order,), ((0, cells),), tables(self.stride, text, cells), title, skipped)


@lru_cache(maxsize=64)  # once per size, not in each step
def tables(stride, text, cells):
    """A block table for each of `stride` layers."""
    starts = block_starts(text, cells)
    first, blocks = len(block_starts(text)) - 1, len(starts) - 1  # first image block, number of blocks
    made = []
    for phase in range(stride):
        read = {*range(first), *range(first + phase, blocks, stride)}
        made.append(block_table([range(blocks) if i < first else sorted({*read, i}) for i in range(blocks)], starts))
    most = max(len(table.keys) for table in made)
    return tuple(table.padded(blocks, blocks, most) for table in made)  # of one shape, so that layers share a graph


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--stride", type=int, default=4)
parser.add_argument("--size", type=int, default=256, help="pixels")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

pipe = FluxPipeline.from_pretrained(find("pipeline"), local_files_only=True)  # the built-in model, or any FLUX.1
options = {"height": args.size, "width": args.size, "num_inference_steps": args.steps, "max_sequence_length": 64}


def generate():
    """The image of the prompt."""
    return pipe(args.prompt, generator=torch.Generator().manual_seed(0), **options).images[0]


dense = generate()
with foveate.apply(pipe, Strided(stride=1)):
    assert generate().tobytes() == dense.tobytes()
with foveate.apply(pipe, Strided(stride=args.stride)) as run:
    generate().save("strided.png")
print(run.summary())
