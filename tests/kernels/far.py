"""Tensors with offsets beyond 2**31 elements, in sparse memory."""

from mmap import mmap

import torch

LAYOUTS = {
    "batch": ((3, 1, 65, 16), (2**30, 16, 16, 1)),
    "heads": ((1, 3, 65, 16), (16, 2**30, 16, 1)),
    "tokens": ((1, 1, 65, 16), (16, 16, 2**25, 1)),
}


def far_apart(dimension):
    """Four float16 tensors [batch, heads, tokens, 16] with a very large stride along one dimension."""
    memory = torch.frombuffer(mmap(-1, 2**33 + 2**20), dtype=torch.float16)
    start = 2**31  # an offset that wraps around in 32 bits points this far before the tensor
    return [memory.as_strided(*LAYOUTS[dimension], start + 4096 * i).normal_() for i in range(4)]
