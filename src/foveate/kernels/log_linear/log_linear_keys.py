# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Launches of the Triton kernels of log-linear attention: gradients of keys and values."""

import math

import torch
import triton
from torch import Tensor

from foveate.kernels.launch import empty_like, padded_size
from foveate.kernels.log_linear import triton_log_linear_keys
from foveate.kernels.log_linear.hierarchical_pooling import level_starts
from foveate.kernels.log_linear.log_linear_queries import (
    KernelConfig,
    Keys,
    batch_stride,
    config_for,
    far,
    real,
    register_limit,
)

__all__ = ["backward_keys"]

# By the largest head_dim, as in `log_linear_queries`. Steps are of queries; only tiles of shared keys use `rows`.
BACKWARD_KEYS = {
    64: KernelConfig(16, 64, 32, 2, 2, 128),
    128: KernelConfig(16, 64, 32, 2, 2, None),
    256: KernelConfig(16, 16, 16, 4, 2, None),
}
BACKWARD_SHARED = {
    64: KernelConfig(64, 32, 32, 4, 3, None),
    128: KernelConfig(64, 32, 32, 4, 2, None),
    256: KernelConfig(64, 16, 16, 8, 2, None),
}
CHUNK = 4096  # most queries that one program walks through for a tile of keys
CUT = 1024  # tiles that one program of `cut` handles
ADDED = 8  # rows of a tile that one program of `add_parts` sums
PROGRAMS = 1024  # target number of programs for shared keys: few tiles, so only short chunks keep the GPU busy


def backward_keys(
    q: Tensor, keys: Keys, binary: Tensor, delta: Tensor, grad_out: Tensor, readers: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of keys, values, extra keys and extra values.

    Args:
        q: Queries.
        keys: Everything that the queries may read.
        binary: LSE in base 2, from `backward_queries`.
        delta: sum(out * grad_out) - grad_lse, from `backward_queries`.
        grad_out: Gradient of the output.
        readers: Nodes that picked each node, for each level, the finest first, in compressed rows: offsets
            [batch, heads, nodes + 1] and ascending indices [batch, heads, picks of all nodes], both int32.
    """
    means = [_empty(x, *x.shape) for x in keys.means.values[-2:]]
    starts = level_starts(q.shape[2], keys.block, len(keys.lists))
    queries = q, grad_out, binary, delta
    for level in range(keys.enriched):
        part = slice(starts[level], starts[level + 1])
        pooled, grads = ([x[:, :, part] for x in xs] for xs in (keys.means.values[-2:], means))
        above = readers[level + 1] if level < len(keys.lists) - 1 else None
        _Tiles(keys, queries, pooled, grads, above, level=level).launch(means)
    extra = [keys.extra_k, keys.extra_v]
    d_extra = [empty_like(x) for x in extra]
    if extra[0].shape[2]:
        _Tiles(keys, queries, extra, d_extra, None).launch(means)
    grads = [empty_like(keys.k), empty_like(keys.v)]
    _Tiles(keys, queries, [keys.k, keys.v], grads, readers[0], span=keys.block).launch(means, fold=True)
    return grads[0], grads[1], d_extra[0], d_extra[1]


class _Tiles:
    """Tiles of one kind of keys: tokens, nodes of one level, or extra keys.

    Args:
        keys: Everything that the queries may read.
        queries: Queries, gradient of the output, binary and delta.
        read: Keys and values of these tiles.
        grads: Outputs: gradients of `read`.
        readers: Nodes that picked each tile; None if all queries read all tiles.
        level: Level of the nodes, 0 for the finest; -1 for tokens and extra keys.
        span: Number of queries of a reader; by default those of a node one level up.
    """

    def __init__(
        self, keys: Keys, queries: tuple[Tensor, ...], read: list[Tensor], grads: list[Tensor],
        readers: tuple[Tensor, Tensor] | None, *, level: int = -1, span: int | None = None,
    ):  # fmt: skip
        self.keys, self.queries, self.read, self.grads, self.readers = keys, queries, read, grads, readers
        self.level, self.below = level, keys.block ** (level + 1)
        self.span = self.below * keys.block if span is None else span
        self.config = config_for(BACKWARD_KEYS if readers else BACKWARD_SHARED, read[0].shape[3])
        self.rows = keys.block if readers else self.config.rows
        self.samples, self.tiles = math.prod(read[0].shape[:2]), triton.cdiv(read[0].shape[2], self.rows)
        if readers:
            self.chunk, lengths = CHUNK, readers[1].shape[2] * self.span
            self.parts = 2 * lengths // CHUNK  # at most: rounding up less than doubles the chunks of a tile
        else:
            work = self.samples * self.tiles * queries[0].shape[2]
            self.chunk = max(CHUNK // 4, triton.cdiv(work, PROGRAMS))
            self.parts = self.tiles * triton.cdiv(queries[0].shape[2], self.chunk)

    def launch(self, means: list[Tensor], *, fold: bool = False) -> None:
        """Compute the gradients; with `fold`, add those of the means to those of the tokens."""
        listed, keys = self.readers is not None, self.keys
        batch, heads, _, dim = self.read[0].shape
        used, first, end, tile = self._cut()
        sums = [_empty(x, batch, heads, self.parts * self.rows, dim) for x in self.grads]
        self._walk(sums, means, used, first, tile, fold=fold)
        if not self.parts:
            return
        counts, items = keys.means.counts, self.parts if listed else self.tiles
        triton_log_linear_keys.add_parts[(self.samples * items * (self.rows // ADDED),)](
            *sums, *self.grads, real(keys), counts, *means, used, first, end, tile, heads, self.queries[0].shape[2],
            self.read[0].shape[2], counts.shape[1], self.chunk, self.parts, batch_stride(keys.real),
            batch_stride(counts), *(stride for x in self.grads for stride in x.stride()[:3]),
            LISTED=listed, FOLD=fold, ENRICHED=keys.enriched, MASKED=keys.real is not None, B=keys.block,
            BT=self.rows, BR=ADDED, D=dim, BD=padded_size(dim),
        )  # fmt: skip

    def _cut(self) -> list[Tensor]:
        """Number of parts in use, first and end part of each tile, and tile of each part.

        Any tensors if there are no parts or if all tiles are split alike.
        """
        if not self.readers or not self.parts:
            return 4 * [self.keys.lists[0]]
        offsets, shift = self.readers[0], self.span.bit_length() - 1
        used = offsets.new_zeros(self.samples)
        sizes = self.tiles, self.tiles, self.parts
        first, end, tile = (_empty(offsets, self.samples, size, dtype=torch.int32) for size in sizes)
        triton_log_linear_keys.cut[(self.samples * triton.cdiv(self.tiles, CUT),)](
            offsets, used, first, end, tile, self.tiles, shift, self.chunk, self.parts, BT=CUT
        )
        return [used, first, end, tile]

    def _walk(
        self, sums: list[Tensor], means: list[Tensor], used: Tensor, first: Tensor, tile: Tensor, *, fold: bool
    ) -> None:
        keys, (q, g, binary, delta), logs = self.keys, self.queries, self.keys.means.logs
        tokens, dim = q.shape[2:]
        start = level_starts(tokens, keys.block, self.level)[-1] if self.level > 0 else 0
        offsets, numbers = self.readers or (used, used)
        strided = *self.read, *self.grads, q, g
        triton_log_linear_keys.backward_keys[(self.samples * (self.parts + bool(self.readers) * self.tiles),)](
            *strided, *sums, binary, delta, real(keys), logs[:, start:], keys.means.counts, offsets, numbers,
            keys.lists[max(self.level, 0)], *means, used, first, tile, keys.scale / math.log(2), keys.scale,
            q.shape[1], tokens, self.read[0].shape[2], logs.shape[1], self.span.bit_length() - 1, self.below,
            keys.top_k, self.chunk, self.parts, batch_stride(keys.real), batch_stride(logs),
            *(stride for x in strided for stride in x.stride()[:3]),
            LISTED=self.readers is not None, NODES=self.level >= 0, FOLD=fold,
            ENRICHED=keys.enriched, REWEIGHT=keys.reweight, EXCLUDE=keys.exclude, MASKED=keys.real is not None,
            B=keys.block, BT=self.rows, BM=self.config.step, D=dim, BD=padded_size(dim), FAR=far(strided),
            STAGES=self.config.stages, num_warps=max(self.config.warps, min(self.rows // 8, 4)),
            **register_limit(self.config),
        )  # fmt: skip


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return like.new_empty(shape, dtype=dtype)
