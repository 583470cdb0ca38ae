"""Reference implementations for tests: float64 attention under a dense mask, and random tables."""

import torch

from foveate.ops.block_table import block_starts, block_table


def random_table(seed, queries, keys=None, block=64):
    """A table in which every query block reads a random set of key blocks, which may be empty."""
    generator = torch.Generator().manual_seed(seed)
    query_starts = block_starts(*queries, block=block)
    key_starts = block_starts(*(keys or queries), block=block)
    n_keys = len(key_starts) - 1
    lists = []
    for _ in range(len(query_starts) - 1):
        count = int(torch.randint(0, n_keys + 1, (), generator=generator))
        lists.append(torch.randperm(n_keys, generator=generator)[:count].tolist())
    return block_table(lists, query_starts, key_starts)


def dense_attention(q, k, v, mask, scale=None):
    """Output and LSE of masked softmax attention in float64; rows without keys give zeros and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    scores = (scale or q.shape[-1] ** -0.5) * q @ k.mT
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
    return weights @ v, scores.logsumexp(-1)
