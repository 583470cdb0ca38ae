"""One softmax over picked blocks and shared keys: the core of the portable path of log-linear attention.

*Shared keys* are the means of all levels, the finest first, followed by extra keys. All queries of a *run*, up to 256,
attend to the same shared keys; picked blocks of tokens differ between blocks of queries. Both are gathered from tables
for a few runs at a time, so that memory stays linear in the number of tokens. The backward pass recomputes the scores.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops.hierarchical_pooling import children

__all__ = ["picked_attention"]

LONGEST_RUN = 256  # whole blocks of any size, and never more than one node of level 2
AT_ONCE = 2**20  # entries gathered and scored at once, unless a single block needs more


@torch.library.custom_op("foveate::picked_attention", mutates_args=())
def picked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_k: Tensor,
    shared_v: Tensor,
    shared_bias: Tensor,
    real: Tensor | None,
    lists: list[Tensor],
    block: int,
    enriched: int,
    exclude: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of every query. Differentiable once in q, k, v, shared_k and shared_v.

    Values may have fewer channels than keys. A query without visible keys gets zeros and an LSE of -inf.

    Args:
        q: Queries [batch, heads, tokens, dim].
        k: Keys.
        v: Values.
        shared_k: Means of `enriched` levels, the finest first, then extra keys, visible to all queries.
        shared_v: Values of the shared keys.
        shared_bias: Bias of their scores [1 or batch, shared], float32 or wider; -inf hides a key from all queries.
        real: Bool [batch, tokens], False for padding, which is hidden from all queries.
        lists: Lists of a `Selection`.
        block: Tokens of a block.
        enriched: Number of levels with means among the shared keys.
        exclude: Whether to hide from queries the means of nodes that their ancestors picked.
        scale: Factor on q·k.
    """
    split = split_of(q, shared_k, lists, block, enriched)
    tables = tables_of(k, v, shared_k, shared_v, shared_bias, real, split)
    queries = split.runs_of(q)
    lse = queries.new_empty(*queries.shape[:2], 1, dtype=shared_bias.dtype)
    out = v.new_empty(*queries.shape[:2], v.shape[3])
    with torch.autocast(q.device.type, enabled=False):
        for piece, reads in pieces(tables, lists, split, exclude):
            q_part = queries[piece].to(lse.dtype)
            scores = [read.scores(q_part, scale) for read in reads]
            top = _per_run((part.amax(-1) for part in scores), q_part).amax(0)
            top = top.clamp(min=torch.finfo(top.dtype).min)  # finite even without visible keys
            weights = [part.sub_(read.cut(top)).exp_() for part, read in zip(scores, reads, strict=True)]
            total = _per_run((part.sum(-1) for part in weights), q_part).sum(0)
            mixed = _per_run((part @ read.v for part, read in zip(weights, reads, strict=True)), q_part).sum(0)
            out[piece] = mixed / total.clamp(min=torch.finfo(total.dtype).tiny)
            lse[piece] = top + total.log()
    return _to_tokens(out, v), lse.view(*q.shape[:2], -1)[:, :, : q.shape[2]].contiguous()


@picked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, bias: Tensor, *args: object) -> Any:
    return torch.empty_like(v), q.new_empty(q.shape[:3], dtype=bias.dtype)


@torch.library.custom_op("foveate::picked_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, grad_lse: Tensor, lse: Tensor, tensors: list[Tensor], real: Tensor | None, lists: list[Tensor],
    block: int, enriched: int, exclude: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, shared_k and shared_v. `tensors` are the first arguments of `picked_attention`."""
    q, k, v, shared_k, shared_v, shared_bias = tensors
    split = split_of(q, shared_k, lists, block, enriched)
    tables = tables_of(k, v, shared_k, shared_v, shared_bias, real, split)
    sums = [[torch.zeros_like(x, dtype=lse.dtype).flatten(1) for x in (table.k, table.v)] for table in tables]
    queries, grads = split.runs_of(q), split.runs_of(grad_out)
    lse = lse.where(lse.isfinite(), 0)  # without visible keys, all weights are 0
    lse, grad_lse = (split.runs_of(x[..., None]) for x in (lse, grad_lse))
    dq = torch.empty_like(queries)
    with torch.autocast(q.device.type, enabled=False):
        for piece, reads in pieces(tables, lists, split, exclude):
            q_part, g_part = queries[piece].to(lse.dtype), grads[piece].to(lse.dtype)
            weights = [read.scores(q_part, scale).sub_(read.cut(lse[piece])).exp_() for read in reads]
            ds = [read.cut(g_part) @ read.v.mT for read in reads]
            mean = _per_run(((p * d).sum(-1) for p, d in zip(weights, ds, strict=True)), q_part).sum(0)
            mean -= grad_lse[piece]
            for p, d, read, (dk, dv) in zip(weights, ds, reads, sums, strict=True):
                d.sub_(read.cut(mean)).mul_(p).mul_(scale)
                _add(dk, read.rows, d.mT @ read.cut(q_part))
                _add(dv, read.rows, p.mT @ read.cut(g_part))
            dq[piece] = _per_run((d @ read.k for d, read in zip(ds, reads, strict=True)), q_part).sum(0)
    (dk, dv), (dshared_k, dshared_v) = sums
    pairs = (dq, q), (dk, k), (dv, v), (dshared_k, shared_k), (dshared_v, shared_v)
    return tuple(_to_tokens(grad, x) for grad, x in pairs)  # pyright: ignore[reportReturnType]


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, lse: Tensor, tensors: list[Tensor], *args: Any) -> Any:
    return tuple(torch.empty_like(x) for x in tensors[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lists = inputs[:8]
    ctx.options = inputs[8:]
    ctx.save_for_backward(output[1], *tensors, *lists)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    lse, *saved = ctx.saved_tensors
    tensors, real, lists = saved[:6], saved[6], saved[7:]
    grads = _backward(grad_out, grad_lse, lse, tensors, real, lists, *ctx.options)
    return *grads, None, None, [None] * len(lists), *[None] * len(ctx.options)


picked_attention.register_autograd(_differentiate, setup_context=_save)


def _per_run(parts: Iterable[Tensor], q: Tensor) -> Tensor:
    """Results for picked blocks and for shared keys, stacked per run: [2, runs, queries, channels]."""
    return torch.stack([part.reshape(*q.shape[:2], -1) for part in parts])


def _to_tokens(x: Tensor, like: Tensor) -> Tensor:
    """Convert runs, or rows of a table, to [batch, heads, tokens, dim] without padding."""
    return torch.empty_like(like).copy_(x.view(*like.shape[:2], -1, like.shape[3])[:, :, : like.shape[2]])


def _add(table: Tensor, rows: Tensor, part: Tensor) -> None:
    """Add to rows of a table in a fixed order; row indices may repeat."""
    part = part.reshape(-1, table.shape[1])
    if table.is_cuda:
        table.index_put_((rows.flatten(),), part, accumulate=True)  # sorts first; index_add_ adds in any order
    else:
        table.index_add_(0, rows.flatten(), part)


# --- keys that queries read ---


class Split(NamedTuple):
    """Split of queries into runs, and numbers of their keys.

    Attributes:
        block: Tokens of a block.
        blocks: Number of blocks of a head.
        means: Number of pooled keys (block means) among the shared keys, for each level that has any.
        shared: Number of shared keys.
        run: Queries of a run.
        runs: Number of runs of a head.
        heads: Batch size times number of heads.
        at_once: Number of runs in one piece.
    """

    block: int
    blocks: int
    means: tuple[int, ...]
    shared: int
    run: int
    runs: int
    heads: int
    at_once: int

    def runs_of(self, x: Tensor) -> Tensor:
        """Convert x [batch, heads, tokens, dim] to [runs of all heads, queries, dim], padded."""
        padded = pad(x, (0, 0, 0, self.runs * self.run - x.shape[2]))
        return padded.reshape(-1, self.run, x.shape[3])


class Table(NamedTuple):
    """Keys in rows of equal length. The last row of each head is hidden, and an index of -1 refers to it.

    Attributes:
        k: Keys [rows, keys, dim].
        v: Values.
        bias: Bias of scores [rows, keys].
        rows: Number of rows of one head.
    """

    k: Tensor
    v: Tensor
    bias: Tensor
    rows: int

    def read(self, numbers: Tensor, heads: Tensor) -> "Read":
        """Read the rows with these indices [lists, entries]; each list belongs to one of `heads`."""
        rows = numbers.where(numbers >= 0, self.rows - 1) + heads[:, None] * self.rows
        k, v = (x.flatten(1).index_select(0, rows.flatten()).view(len(rows), -1, x.shape[2]) for x in (self.k, self.v))
        bias = self.bias[rows].view(len(rows), 1, -1)
        return Read(rows, k.to(bias.dtype), v.to(bias.dtype), bias)


class Read(NamedTuple):
    """Keys gathered from a table by lists; the queries of a list are a run, or a block of a run.

    Attributes:
        rows: Rows of the table [lists, entries].
        k: Keys [lists, keys, dim].
        v: Values.
        bias: Bias of scores [lists, 1 or queries, keys].
    """

    rows: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor

    def cut(self, x: Tensor) -> Tensor:
        """Convert x [runs, queries, dim] to [lists, queries of a list, dim]."""
        return x.reshape(len(self.rows), -1, x.shape[2])

    def scores(self, q: Tensor, scale: float) -> Tensor:
        """Scores [lists, queries of a list, keys] of queries [runs, queries, dim]."""
        q = self.cut(q)
        return torch.baddbmm(self.bias.expand(-1, q.shape[1], -1), q, self.k.mT, alpha=scale)


def split_of(q: Tensor, shared_k: Tensor, lists: list[Tensor], block: int, enriched: int) -> Split:
    """Split with the longest runs that fit into a piece, as many at once as fit."""
    batch, heads, tokens, dim = q.shape
    means = tuple(x.shape[2] for x in lists[:enriched])
    picked = lists[0].shape[3] * block
    visible = [x.shape[3] * block for x in lists[1 : enriched + 1]] + list(means[len(lists) - 1 :])
    visible = sum(visible) + shared_k.shape[2] - sum(means)

    def entries(run: int) -> int:
        return run // block * picked * dim + visible * dim + run * (picked + visible)

    run = block
    while run < min(tokens, LONGEST_RUN) and entries(2 * run) <= AT_ONCE:
        run *= 2
    at_once = max(1, AT_ONCE // entries(run))
    return Split(block, lists[0].shape[2], means, shared_k.shape[2], run, -(-tokens // run), batch * heads, at_once)


def tables_of(
    k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, shared_bias: Tensor, real: Tensor | None, split: Split
) -> tuple[Table, Table]:
    """Table of blocks of tokens, and table of shared keys with one key per row."""
    real = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if real is None else real
    bias = torch.zeros(real.shape, dtype=shared_bias.dtype, device=k.device).masked_fill_(~real, -torch.inf)
    blocks = _table(k, v, bias, split.blocks + 1, split.block)
    return blocks, _table(shared_k, shared_v, shared_bias, split.shared + 1, 1)


def _table(k: Tensor, v: Tensor, bias: Tensor, rows: int, keys: int) -> Table:
    room = rows * keys - k.shape[2]
    bias = pad(bias, (0, room), value=-torch.inf)[:, None].expand(*k.shape[:2], -1)
    k, v = (pad(x, (0, 0, 0, room)).reshape(-1, keys, x.shape[3]) for x in (k, v))
    return Table(k, v, bias.reshape(-1, keys), rows)


def pieces(
    tables: tuple[Table, Table], lists: list[Tensor], split: Split, exclude: bool
) -> Iterator[tuple[slice, tuple[Read, Read]]]:
    """Pieces of the runs of all heads, with their keys: picked blocks and shared keys."""
    numbers = torch.arange(split.heads * split.runs, device=lists[0].device)
    starts = torch.arange(0, split.run, split.block, device=numbers.device)
    for start in range(0, len(numbers), split.at_once):
        piece = slice(start, start + split.at_once)
        heads, first = numbers[piece] // split.runs, numbers[piece] % split.runs * split.run
        # blocks past the last one are padding of the last run
        blocks = ((first[:, None] + starts) // split.block).clamp(max=split.blocks - 1)
        picks = _of(lists[0], heads[:, None], blocks).flatten(0, 1)
        visible = _visible(lists, heads, first, split)
        reads = tables[0].read(picks, heads.repeat_interleave(len(starts))), tables[1].read(visible, heads)
        if exclude and split.means:
            hidden = _picked_means(lists, heads, blocks, split, visible).repeat_interleave(split.block, 1)
            reads = reads[0], reads[1]._replace(bias=reads[1].bias.masked_fill(hidden, -torch.inf))
        yield piece, reads


def _of(lists: Tensor, heads: Tensor, nodes: Tensor) -> Tensor:
    """Lists [..., picks] of nodes; heads are counted over the whole batch."""
    return lists.flatten(0, 2)[heads * lists.shape[2] + nodes].long()


def _visible(lists: list[Tensor], heads: Tensor, first: Tensor, split: Split) -> Tensor:
    """Indices of the shared keys [runs, visible] of the runs that begin at tokens `first`; -1 for none."""
    visible, start = [], 0
    for level, nodes in enumerate(split.means, start=1):
        if level < len(lists):
            found = children(_of(lists[level], heads, first // split.block ** (level + 1)), nodes, split.block)
            visible.append(found.where(found < 0, found + start))
            start += nodes
    # the top level and the extra keys are visible to all queries
    visible = torch.cat([*visible, torch.arange(start, split.shared, device=heads.device).expand(len(heads), -1)], 1)
    return visible if visible.shape[1] else heads.new_full((len(heads), 1), -1)


def _picked_means(lists: list[Tensor], heads: Tensor, blocks: Tensor, split: Split, visible: Tensor) -> Tensor:
    """Mask [runs, blocks, visible] of the means of nodes that the block or one of its ancestors picked."""
    picked, start = [], 0
    for level, nodes in enumerate(split.means):
        picks = _of(lists[level], heads[:, None], blocks // split.block**level)
        picked.append(picks.where(picks < 0, picks + start))
        start += nodes
    picked = torch.cat(picked, -1)
    picked = picked.where(picked >= 0, split.shared).sort(-1).values
    visible = visible[:, None].expand(-1, blocks.shape[1], -1).contiguous()
    places = torch.searchsorted(picked, visible).clamp(max=picked.shape[2] - 1)
    return picked.take_along_dim(places, 2) == visible
