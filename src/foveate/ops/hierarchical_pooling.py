"""Hierarchical pooling of a sequence, and top-k selection of its blocks from the coarsest level to the finest.

A *node* of level l is a run of ``block_size ** l`` tokens; the last node of a level may be shorter. A node of
level 1 is a block of tokens. The portable path below is the definition. It runs on any device and scores a bounded
number of candidates at a time.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops import dispatch

__all__ = [
    "MAX_KERNEL_TOP_K",
    "MAX_LEVELS",
    "Readers",
    "Selection",
    "automatic_levels",
    "check_head_dim",
    "check_inputs",
    "check_options",
    "children",
    "choose_blocks",
    "count_tokens",
    "keys_per_query",
    "levels_for",
    "pool",
    "select_blocks",
]

BLOCK_SIZES = (16, 32, 64)
MAX_LEVELS = 4
MAX_KERNEL_TOP_K = 128  # GPU kernels hold lists in registers
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AT_ONCE = 2**20  # entries gathered or scored at once


class Readers(NamedTuple):
    """Nodes that picked each node of a level, in compressed rows.

    Attributes:
        offsets: Int32 [batch, heads, nodes + 1]: node j was picked by ``rows[offsets[j] : offsets[j + 1]]``.
        rows: Int32 [batch, heads, entries]: indices of nodes, ascending for each j; -1 after the last offset.
    """

    offsets: Tensor
    rows: Tensor


class Selection(NamedTuple):
    """Nodes that each node of a sequence picked, for one or more calls of `log_linear_attention`.

    Attributes:
        lists: Picks for each level, the finest first: int32 [batch, heads, nodes, picks], ascending, padded with -1.
            ``lists[0]`` holds the blocks of tokens that each block of queries reads.
        counts: Number of real tokens in each node, for each level: int32 [batch, nodes], or one row for the whole
            batch if no token is padding.
        tokens: Length of the sequence.
        block_size: Tokens of a block, and children of a node.
        top_k: The option `top_k` of the call.
        full: Whether lists are known to have no -1, because no token was padding.
    """

    lists: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    tokens: int
    block_size: int
    top_k: int
    full: bool = False

    @property
    def levels(self) -> int:
        """Number of pooled levels."""
        return len(self.lists)

    def transpose(self, level: int = 1) -> Readers:
        """Nodes that picked each node of a level, for a backward pass over keys.

        Examples:
            >>> picks = torch.tensor([[1, 2], [2, 3], [0, 3], [1, 3]], dtype=torch.int32)
            >>> readers = Selection((picks[None, None],), (), 64, 16, 2).transpose()
            >>> readers.offsets.flatten().tolist(), readers.rows.flatten().tolist()
            ([0, 1, 3, 5, 8], [2, 0, 3, 0, 1, 1, 2, 3])
        """
        lists = self.lists[level - 1]
        nodes, top_k = lists.shape[2:]
        keys = lists.flatten(2).long()
        keys, order = keys.where(keys >= 0, nodes).sort(dim=-1, stable=True)
        rows = (order // top_k).where(keys < nodes, -1)
        starts = torch.arange(nodes + 1, device=keys.device).expand(*keys.shape[:2], -1).contiguous()
        return Readers(torch.searchsorted(keys, starts).int(), rows.int())


def select_blocks(
    q: Float[Tensor, "batch heads tokens head_dim"],
    k: Float[Tensor, "batch heads tokens head_dim"],
    *,
    top_k: int = 8,
    block_size: int = 16,
    levels: int | None = None,
    key_padding_mask: Bool[Tensor, "batch tokens"] | None = None,
) -> Selection:
    """Select `top_k` blocks of keys for each block of queries to read, level by level.

    Queries and keys are averaged over the nodes of every level. On the top level, each node picks the nodes whose mean
    key has the largest product with its mean query. On each level below, it picks among the children of its parent's
    picks. Ties go to the first node; nodes without real tokens are never picked. No gradients flow through picks.

    Args:
        q: Queries, after normalization and RoPE.
        k: Keys, after normalization and RoPE.
        top_k: Number of nodes that each node picks; all of them if there are fewer.
        block_size: Tokens of a block, and children of a node: 16, 32 or 64.
        levels: Number of pooled levels, 1 to 4; None uses `automatic_levels`.
        key_padding_mask: True where a token is real.

    Raises:
        ValueError: If the tensors do not match, or an option is out of range.

    Examples:
        >>> q = k = torch.randn(1, 2, 9000, 64)
        >>> selection = select_blocks(q, k)
        >>> selection.levels, selection.lists[0].shape  # 563 blocks, the last of 8 tokens
        (2, torch.Size([1, 2, 563, 8]))

    Source: arXiv 2512.16615, hierarchical top-k selection.
    """
    levels = check_inputs({"q": q, "k": k}, top_k, block_size, levels, key_padding_mask)
    portable = top_k > MAX_KERNEL_TOP_K
    backend = dispatch.choose("select_blocks", q.device, q.dtype, q.shape[3], portable=portable)
    lists, counts = backend.run(q.detach(), k.detach(), key_padding_mask, top_k, block_size, levels)
    return Selection(tuple(lists), tuple(counts), q.shape[2], block_size, top_k, full=key_padding_mask is None)


def automatic_levels(tokens: int, block_size: int = 16, top_k: int = 8) -> int:
    """Smallest number of levels, at most 4, with a top level of at most ``2 * top_k * block_size`` nodes.

    Each level below adds ``top_k * block_size`` keys to those that a query reads, so one more level reads fewer keys
    if the top level has more than that.

    Examples:
        >>> [automatic_levels(side * side) for side in (64, 128, 256, 512, 2048)]
        [1, 2, 2, 3, 4]
    """
    most = 2 * top_k * block_size
    return next((level for level in range(1, MAX_LEVELS) if _nodes(tokens, block_size, level) <= most), MAX_LEVELS)


def check_inputs(
    tensors: dict[str, Tensor], top_k: int, block_size: int, levels: int | None, mask: Tensor | None = None
) -> int:
    """Check queries, keys, mask and options. Returns the number of levels to use.

    Raises:
        ValueError: If they do not match or are out of range.
    """
    names, (q, *others) = ", ".join(tensors), tensors.values()
    if q.ndim != 4 or 0 in q.shape or any(x.shape != q.shape for x in others):
        raise ValueError(
            f"{names} must be [batch, heads, tokens, head_dim], of one shape and not empty (repeat key heads that "
            f"several query heads share): got {', '.join(str(list(x.shape)) for x in tensors.values())}"
        )
    if q.dtype not in DTYPES or any(x.dtype != q.dtype or x.device != q.device for x in others):
        raise ValueError(
            f"{names} must share one device and one dtype, which may be float32, bfloat16, float16 or float64: got "
            f"{', '.join(f'{x.dtype} on {x.device}' for x in tensors.values())}"
        )
    check_head_dim(q.shape[3])
    check_options(top_k, block_size, levels)
    if mask is not None and (mask.shape != q.shape[::2] or mask.dtype != torch.bool or mask.device != q.device):
        raise ValueError(
            f"key_padding_mask must be bool, [{q.shape[0]}, {q.shape[2]}], on {q.device}, True where a token is real: "
            f"got {mask.dtype}, {list(mask.shape)}, on {mask.device}"
        )
    return levels_for(q.shape[2], top_k, block_size, levels)


def check_head_dim(head_dim: int) -> None:
    """Check that a head_dim is supported.

    Raises:
        ValueError: If it is not between 32 and 256.
    """
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {head_dim}: change the number of heads"
        )


def check_options(top_k: int, block_size: int, levels: int | None) -> None:
    """Check options independently of the sequence.

    Raises:
        ValueError: If an option is out of range.
    """
    for name, value in (("top_k", top_k), ("block_size", block_size), ("levels", levels)):
        if isinstance(value, float):
            raise ValueError(f"{name} must be a whole number, not {value}")
    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
    if levels is not None and not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"levels must be 1 to {MAX_LEVELS}, or None for automatic, not {levels}")


def levels_for(tokens: int, top_k: int, block_size: int, levels: int | None) -> int:
    """Number of levels of a call with the option `levels`; None is `automatic_levels`.

    Raises:
        ValueError: If a lower level is a single node already.
    """
    if levels is None:
        return automatic_levels(tokens, block_size, top_k)
    most = next((level for level in range(1, MAX_LEVELS) if _nodes(tokens, block_size, level) == 1), MAX_LEVELS)
    if levels > most:
        raise ValueError(
            f"levels={levels} is too many for {tokens} tokens: with block_size={block_size} level {most} is one "
            f"node already; use levels<={most}, or None for automatic"
        )
    return levels


def keys_per_query(tokens: int, top_k: int, block_size: int, levels: int, enriched: int) -> int:
    """Largest number of keys, tokens and means, that a query reads; fewer if last nodes are shorter.

    Examples:
        >>> [keys_per_query(side * side, 8, 16, levels, levels) for side, levels in ((64, 1), (128, 2), (512, 3))]
        [384, 320, 448]
    """
    nodes = [_nodes(tokens, block_size, level) for level in range(levels + 1)]
    below_top = [min(top_k * block_size, count) for count in nodes[:levels]]
    return sum([*below_top, nodes[levels]][: enriched + 1])


def _nodes(tokens: int, block: int, level: int) -> int:
    return -(-tokens // block**level)


# --- pooling ---------------------------------------------------------------------------------------------------------


def count_tokens(
    x: Float[Tensor, "batch heads tokens dim"], real: Bool[Tensor, "batch tokens"] | None, block: int, levels: int
) -> tuple[Int[Tensor, "sets _"], ...]:
    """Number of real tokens in each node of every level, int32; one row for the whole batch if `real` is None."""
    ones = torch.ones(1, x.shape[2], dtype=torch.int32, device=x.device) if real is None else real.int()
    counts, below = [], ones[:, None, :, None]
    for _ in range(levels):
        below = _block_sums(below, block, torch.int32)
        counts.append(below[:, 0, :, 0])
    return tuple(counts)


def pool(
    x: Float[Tensor, "batch heads tokens dim"], counts: tuple[Int[Tensor, "sets _"], ...], block: int
) -> list[Float[Tensor, "batch heads _ dim"]]:
    """Mean of the real tokens of each node of every level, in float32 or wider. Padding in `x` must be zero.

    Sums instead of means are passed from level to level, so that a shorter last node weighs only its tokens.
    """
    sums, means = x, []
    for count in counts:
        sums = _block_sums(sums, block, torch.promote_types(x.dtype, torch.float32))
        means.append(sums / count.clamp(min=1)[:, None, :, None])
    return means


def _block_sums(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Sums over blocks of dimension 2; the last block may be shorter."""
    whole = x.shape[2] // block * block
    sums = x[:, :, :whole].unflatten(2, (-1, block)).sum(3, dtype=dtype)
    if whole == x.shape[2]:
        return sums
    return torch.cat([sums, x[:, :, whole:].sum(2, keepdim=True, dtype=dtype)], 2)


# --- selection -------------------------------------------------------------------------------------------------------


@dispatch.register("select_blocks", "portable")
def portable(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """`select_blocks` in plain PyTorch: the lists and counts of a `Selection`."""
    if real is not None:
        q, k = (x.masked_fill(~real[:, None, :, None], 0) for x in (q, k))
    counts = count_tokens(k, real, block, levels)
    return choose_blocks(q, [mean.to(k.dtype) for mean in pool(k, counts, block)], counts, top_k, block), counts


def choose_blocks(
    q: Float[Tensor, "batch heads tokens dim"],
    pooled_k: list[Float[Tensor, "batch heads _ dim"]],
    counts: tuple[Int[Tensor, "sets _"], ...],
    top_k: int,
    block: int,
) -> list[Int[Tensor, "batch heads _ picks"]]:
    """Lists of `select_blocks` from pooled keys. Padding in `q` must be zero."""
    with torch.no_grad():
        pooled_q = [mean.to(q.dtype) for mean in pool(q.detach(), counts, block)]
    return _pick(pooled_q, [k.detach() for k in pooled_k], list(counts), top_k, block)


@torch.library.custom_op("foveate::select_blocks_portable", mutates_args=())
def _pick(q: list[Tensor], k: list[Tensor], counts: list[Tensor], top_k: int, block: int) -> list[Tensor]:
    lists: list[Tensor] = []
    with torch.autocast(q[0].device.type, enabled=False):
        for level in reversed(range(len(q))):
            above = lists[0] if lists else None
            lists.insert(0, _pick_level(q[level], k[level], counts[level], above, top_k, block))
    return lists


@_pick.register_fake
def _(q: list[Tensor], k: list[Tensor], counts: list[Tensor], top_k: int, block: int) -> list[Tensor]:
    return [x.new_empty(*x.shape[:3], min(top_k, x.shape[2]), dtype=torch.int32) for x in q]


def _pick_level(q: Tensor, k: Tensor, counts: Tensor, above: Tensor | None, top_k: int, block: int) -> Tensor:
    """Lists of one level. Siblings choose among the same candidates, so families are scored together."""
    batch, heads, nodes, dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    families = _nodes(nodes, block, 1)
    q = pad(q.to(wide), (0, 0, 0, families * block - nodes)).view(-1, block, dim)
    k = pad(k.to(wide), (0, 0, 0, 1)).view(-1, dim)  # one more node per head, for the -1 in lists
    alive = pad(counts > 0, (0, 1))[:, None].expand(batch, heads, -1).reshape(-1)
    picks = torch.empty(len(q), block, min(top_k, nodes), dtype=torch.int32, device=q.device)
    entries = (nodes if above is None else above.shape[3] * block) * (dim + block)
    for family in torch.arange(len(q), device=q.device).split(max(1, AT_ONCE // entries)):
        if above is None:
            candidates = torch.arange(nodes, device=q.device).expand(len(family), -1)
        else:
            candidates = children(above.flatten(0, 2)[family].long(), nodes, block)
        rows = candidates.where(candidates >= 0, nodes) + (family // families * (nodes + 1))[:, None]
        scores = q[family] @ k[rows].mT
        best = _best(scores, alive[rows][:, None], picks.shape[2])
        picks[family] = pad(candidates, (0, 1), value=-1)[:, None].take_along_dim(best, 2).int()
    return picks.view(batch, heads, families * block, -1)[:, :, :nodes].contiguous()


def children(picks: Int[Tensor, "rows picks"], nodes: int, block: int) -> Int[Tensor, "rows candidates"]:
    """Indices of the children of nodes, in the same order; -1 beyond the `nodes` of the level below."""
    below = (picks[..., None] * block + torch.arange(block, device=picks.device)).flatten(1)
    return below.where((below >= 0) & (below < nodes), -1)


def _best(scores: Tensor, alive: Tensor, top_k: int) -> Tensor:
    """Indices of the `top_k` largest scores of each row, ascending; ties go to the first.

    If fewer are alive, the list is padded with the number of scores, an index past the end.
    """
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(~alive, -torch.inf)  # NaN must propagate
    last = scores.topk(top_k).values[..., -1:]
    above, tied = scores > last, (scores == last) & alive
    chosen = above | (tied & (tied.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)))
    places = torch.arange(scores.shape[-1], device=scores.device).where(chosen, scores.shape[-1])
    return places.topk(top_k, largest=False).values


dispatch.register_kernels("select_blocks", "log_linear")
