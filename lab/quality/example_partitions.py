"""Partitions of examples into blocks for lab/quality/examples.py: Sub-CP, baselines and controls."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2
from torch import Tensor

from foveate import SubCP
from foveate.methods.example_blocks import Classes
from foveate.methods.sub_cp import STRATEGIES

__all__ = ["CONTROLS", "PARTITIONS", "RANDOM", "partition"]

Embeddings = Float[Tensor, "examples dim"]
Labels = Int[Tensor, "examples"]
Ids = list[list[int]]


def partition(name: str, embeddings: Embeddings, labels: Labels, blocks: int, size: int, seed: int) -> Ids:
    """Blocks of examples by the method of this name. The seed matters only for the methods in `RANDOM`."""
    return PARTITIONS[name](embeddings, labels, blocks, size, torch.Generator().manual_seed(seed))


def _strategy(name: Any) -> Callable[..., Ids]:
    def blocks_of(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
        return SubCP(blocks=blocks, block_size=size, strategy=name).partition(rows).ids

    return blocks_of


def _random(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    return _round_robin(torch.randperm(len(rows), generator=generator)[: blocks * size], blocks)


def _stratified(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    """Random examples with the class shares of the pool, by largest remainder, distributed class by class."""
    quotas = Classes(labels, list(range(int(labels.max()) + 1))).quotas(blocks * size, equal=False)
    mixed = torch.randperm(len(rows), generator=generator)
    cards = [mixed[labels[mixed] == label][:quota] for label, quota in enumerate(quotas.tolist())]
    return _round_robin(torch.cat(cards), blocks)


def _clusters_as_blocks(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    """k-means: each block has the examples nearest to one cluster centre."""
    return _nearest(rows, _centres(rows, blocks, generator), size)


def _clusters_to_all(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    """k-means: each block has one example of each cluster."""
    return [list(block) for block in zip(*_nearest(rows, _centres(rows, size, generator), blocks), strict=True)]


def _mmr(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    """Maximal marginal relevance: similar to the pool, dissimilar to previous picks, split in order of picking."""
    similar = rows @ rows.T
    relevance, nearest = similar.mean(1), torch.zeros(len(rows))
    picks: list[int] = []
    for _ in range(blocks * size):
        worth = 0.5 * relevance - 0.5 * nearest
        worth[picks] = -torch.inf
        picks.append(int(worth.argmax()))
        nearest = similar[:, picks].amax(1)
    return [picks[start : start + size] for start in range(0, len(picks), size)]


def _selection_at_random(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    union = SubCP().select(rows, blocks * size).ids
    return _round_robin(union[torch.randperm(len(union), generator=generator)], blocks)


def _selection_in_order(rows: Embeddings, labels: Labels, blocks: int, size: int, generator: torch.Generator) -> Ids:
    return _round_robin(SubCP().select(rows, blocks * size).ids, blocks)


CONTROLS = "global_local's examples, dealt at random", "global_local's examples, dealt in order"  # names in results
RANDOM = "random", "stratified", "k-means similar", "k-means diverse", CONTROLS[0]

PARTITIONS: dict[str, Callable[..., Ids]] = {
    "random": _random,
    "stratified": _stratified,
    "k-means similar": _clusters_as_blocks,
    "k-means diverse": _clusters_to_all,
    "MMR": _mmr,
    **{name: _strategy(name) for name in STRATEGIES},
    CONTROLS[0]: _selection_at_random,
    CONTROLS[1]: _selection_in_order,
}


def _round_robin(examples: Int[Tensor, "chosen"], blocks: int) -> Ids:
    return [examples[block::blocks].tolist() for block in range(blocks)]


def _centres(rows: Embeddings, clusters: int, generator: torch.Generator) -> Float[Tensor, "clusters dim"]:
    seed = int(torch.randint(2**31, (), generator=generator))
    return torch.from_numpy(kmeans2(rows.numpy(), clusters, minit="++", rng=seed)[0])


def _nearest(rows: Embeddings, centres: Float[Tensor, "clusters dim"], size: int) -> Ids:
    """The `size` nearest examples of each centre: nearest pairs first, no example twice."""
    parts: Ids = [[] for _ in centres]
    placed = set[int]()
    for pair in torch.cdist(rows, centres).flatten().sort(stable=True).indices.tolist():
        example, cluster = divmod(pair, len(centres))
        if example not in placed and len(parts[cluster]) < size:
            parts[cluster].append(example)
            placed.add(example)
    return parts
