"""Pooled levels of a sequence, and which of its blocks every block picks, from coarse to fine.

A *node* of level l stands for a run of ``block_size ** l`` tokens; the last one of a level for what is left. A node of
level 1 is a block of tokens. The portable path below is the definition and runs on any device: it scores a bounded
number of candidates at a time.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from foveate.ops import dispatch
from foveate.ops.selection import Selection

__all__ = [
    "MOST_PICKS",
    "able",
    "automatic_levels",
    "check",
    "check_head_dim",
    "check_options",
    "children",
    "choose_blocks",
    "count_tokens",
    "keys_in_sight",
    "levels_for",
    "pool",
    "select_blocks",
    "spread",
]

BLOCK_SIZES = (16, 32, 64)
MOST_LEVELS = 4
MOST_PICKS = 128  # of a node in kernels
HEAD_DIMS = (32, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AT_ONCE = 2**20  # entries of what is gathered or scored in one piece


def select_blocks(
    q: Float[Tensor, "batch heads tokens head_dim"],
    k: Float[Tensor, "batch heads tokens head_dim"],
    *,
    top_k: int = 8,
    block_size: int = 16,
    levels: int | None = None,
    key_padding_mask: Bool[Tensor, "batch tokens"] | None = None,
) -> Selection:
    """The `top_k` blocks of keys that each block of queries reads, found level by level.

    Queries and keys are averaged over the nodes of every level. At the top each node picks the nodes whose mean key
    has the largest product with its mean query; at each level below, it picks among the children of what its parent
    picked. Of equal scores the first wins. Nodes without a real token are never picked. Nothing is differentiated.

    Args:
        q: Queries, after normalisation and RoPE.
        k: Keys, likewise.
        top_k: How many nodes each node picks; all of them where there are fewer.
        block_size: Tokens of a block, and children of a node: 16, 32 or 64.
        levels: Pooled levels, 1 to 4; None takes those of `automatic_levels`.
        key_padding_mask: True where a token is real.

    Raises:
        ValueError: If tensors do not fit each other, or an option is out of its range.

    Examples:
        >>> q = k = torch.randn(1, 2, 9000, 64)
        >>> selection = select_blocks(q, k)
        >>> selection.levels, selection.lists[0].shape  # 563 blocks, the last of 8 tokens
        (2, torch.Size([1, 2, 563, 8]))

    Source: arXiv 2512.16615, hierarchical top-k selection.
    """
    levels = check({"q": q, "k": k}, top_k, block_size, levels, key_padding_mask)
    run = able("select_blocks", q.device, q.dtype, q.shape[3], top_k)[-1].run
    lists, counts = run(q.detach(), k.detach(), key_padding_mask, top_k, block_size, levels)
    full = key_padding_mask is None
    return Selection(tuple(lists), tuple(counts), q.shape[2], block_size, top_k, full)


def able(op: str, device: torch.device, dtype: torch.dtype, head_dim: int, top_k: int) -> list[dispatch.Backend]:
    """The backends of an op that can run it with so many picks; the first is portable, the last the fastest."""
    known = dispatch.backends(op, device, dtype, head_dim)
    return known[:1] if top_k > MOST_PICKS else known


def automatic_levels(tokens: int, block_size: int = 16, top_k: int = 8) -> int:
    """The fewest levels, 4 at most, whose top has no more than 4 nodes for each key that a level's picks hold.

    Examples:
        >>> [automatic_levels(side * side) for side in (64, 128, 256, 512, 2048)]
        [1, 2, 2, 3, 4]
    """
    enough = 4 * top_k * block_size
    return next((level for level in range(1, MOST_LEVELS) if _nodes(tokens, block_size, level) <= enough), MOST_LEVELS)


def check(
    tensors: dict[str, Tensor], top_k: int, block_size: int, levels: int | None, mask: Tensor | None = None
) -> int:
    """How many levels to use for queries, keys and the like, if they and the options can be used at all.

    Raises:
        ValueError: If not.
    """
    names, (q, *others) = ", ".join(tensors), tensors.values()
    if q.ndim != 4 or 0 in q.shape or any(x.shape != q.shape for x in others):
        raise ValueError(
            f"{names} must be [batch, heads, tokens, head_dim], all alike and not empty (repeat key heads that "
            f"several query heads share): got {', '.join(str(list(x.shape)) for x in tensors.values())}"
        )
    if q.dtype not in DTYPES or any(x.dtype != q.dtype or x.device != q.device for x in others):
        raise ValueError(
            f"{names} must share one device and one dtype of float32, bfloat16, float16 and float64: got "
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
    """Refuse heads of too few or too many channels.

    Raises:
        ValueError: If they are.
    """
    if not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]:
        raise ValueError(f"head_dim must be {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, not {head_dim}: change the heads")


def check_options(top_k: int, block_size: int, levels: int | None) -> None:
    """Refuse options that no tensor could be used with.

    Raises:
        ValueError: If one is out of its range.
    """
    for name, value in (("top_k", top_k), ("block_size", block_size), ("levels", levels)):
        if isinstance(value, float):
            raise ValueError(f"{name} must be a whole number, not {value}")
    if top_k < 1:
        raise ValueError(f"top_k counts blocks, 1 or more, not {top_k}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
    if levels is not None and not 1 <= levels <= MOST_LEVELS:
        raise ValueError(f"levels must be 1 to {MOST_LEVELS}, or None for automatic, not {levels}")


def levels_for(tokens: int, top_k: int, block_size: int, levels: int | None) -> int:
    """How many levels a call uses that asks for so many; None is `automatic_levels`.

    Raises:
        ValueError: If they are more than the tokens have use for.
    """
    if levels is None:
        return automatic_levels(tokens, block_size, top_k)
    nodes = (_nodes(tokens, block_size, level) for level in range(1, MOST_LEVELS))
    most = next((level for level, count in enumerate(nodes, start=1) if count == 1), MOST_LEVELS)
    if levels > most:
        raise ValueError(
            f"levels={levels} is too many for {tokens} tokens: with block_size={block_size} level {most} is one "
            f"node already; use levels<={most}, or None for automatic"
        )
    return levels


def keys_in_sight(tokens: int, top_k: int, block_size: int, levels: int, enriched: int) -> int:
    """How many keys a query reads at most, tokens and means; those of nodes at a ragged end may be fewer.

    Examples:
        >>> [keys_in_sight(side * side, 8, 16, levels, levels) for side, levels in ((64, 1), (128, 2), (512, 3))]
        [384, 320, 448]
    """
    nodes = [_nodes(tokens, block_size, level) for level in range(levels + 1)]
    below = [min(top_k * block_size, count) for count in nodes[:levels]]
    return sum([*below, nodes[levels]][: enriched + 1])


def _nodes(tokens: int, block: int, level: int) -> int:
    return -(-tokens // block**level)


# --- pooling ---------------------------------------------------------------------------------------------------------


def count_tokens(
    x: Float[Tensor, "batch heads tokens dim"], real: Bool[Tensor, "batch tokens"] | None, block: int, levels: int
) -> tuple[Int[Tensor, "sets _"], ...]:
    """How many real tokens each node of every level stands for, int32; one set for the whole batch without `real`."""
    ones = torch.ones(1, x.shape[2], dtype=torch.int32, device=x.device) if real is None else real.int()
    counts, below = [], ones[:, None, :, None]
    for _ in range(levels):
        below = _block_sums(below, block, torch.int32)
        counts.append(below[:, 0, :, 0])
    return tuple(counts)


def pool(
    x: Float[Tensor, "batch heads tokens dim"], counts: tuple[Int[Tensor, "sets _"], ...], block: int
) -> list[Float[Tensor, "batch heads _ dim"]]:
    """Mean of the real tokens of each node of every level, in float32 at least; those not real must be zeros.

    Sums are kept from level to level, not means: nodes at a ragged end do not count for more than they hold.
    """
    sums, means = x, []
    for count in counts:
        sums = _block_sums(sums, block, torch.promote_types(x.dtype, torch.float32))
        means.append(sums / count.clamp(min=1)[:, None, :, None])
    return means


def spread(
    x: Float[Tensor, "batch heads tokens dim"],
    real: Bool[Tensor, "batch tokens"] | None,
    means: list[Float[Tensor, "batch heads _ dim"]],
    counts: tuple[Int[Tensor, "sets _"], ...],
    block: int,
) -> list[Float[Tensor, "batch heads _"]]:
    """Mean squared distance of the real tokens of each node of every level from their mean."""
    weights = x.new_ones(1, x.shape[2]) if real is None else real
    below, total, spreads = x, 0.0, []
    for mean, count in zip(means, counts, strict=True):
        around = mean.repeat_interleave(block, 2)[:, :, : below.shape[2]]
        # of a node of the level below: around its own mean, and its own mean around this one
        total = total + (below - around).square().sum(-1) * weights[:, None]
        total = _block_sums(total[..., None], block, mean.dtype)[..., 0]
        spreads.append(total / count.clamp(min=1)[:, None])
        below, weights = mean, count
    return spreads


def _block_sums(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    whole = x.shape[2] // block * block
    sums = x[:, :, :whole].unflatten(2, (-1, block)).sum(3, dtype=dtype)
    if whole == x.shape[2]:
        return sums
    return torch.cat([sums, x[:, :, whole:].sum(2, keepdim=True, dtype=dtype)], 2)


# --- picking ---------------------------------------------------------------------------------------------------------


@dispatch.register("select_blocks", "portable", takes=lambda *work: True)
def portable(
    q: Tensor, k: Tensor, real: Tensor | None, top_k: int, block: int, levels: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """`select_blocks` in plain PyTorch: the lists and the counts of a `Selection`."""
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
    """The lists of `select_blocks` where keys are pooled already; both must be zeros where a token is not real."""
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
    """One level's lists. Siblings choose among the same candidates, so they are scored together."""
    batch, heads, nodes, dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    families = _nodes(nodes, block, 1)
    q = pad(q.to(wide), (0, 0, 0, families * block - nodes)).view(-1, block, dim)
    k = pad(k.to(wide), (0, 0, 0, 1)).view(-1, dim)  # behind each head a node for the -1 of lists
    alive = pad(counts > 0, (0, 1))[:, None].expand(batch, heads, -1).reshape(-1)
    picks = torch.empty(len(q), block, min(top_k, nodes), dtype=torch.int32, device=q.device)
    entries = (nodes if above is None else above.shape[3] * block) * (dim + block)
    for family in torch.arange(len(q), device=q.device).split(max(1, AT_ONCE // entries)):
        if above is None:
            numbers = torch.arange(nodes, device=q.device).expand(len(family), -1)
        else:
            numbers = children(above.flatten(0, 2)[family].long(), nodes, block)
        rows = numbers.where(numbers >= 0, nodes) + (family // families * (nodes + 1))[:, None]
        scores = q[family] @ k[rows].mT
        best = _best(scores, alive[rows][:, None], picks.shape[2])
        picks[family] = pad(numbers, (0, 1), value=-1)[:, None].take_along_dim(best, 2).int()
    return picks.view(batch, heads, families * block, -1)[:, :, :nodes].contiguous()


def children(picks: Int[Tensor, "rows picks"], nodes: int, block: int) -> Int[Tensor, "rows candidates"]:
    """The nodes under those picked from the level above, ascending; -1 for one that is not among a level's `nodes`."""
    below = (picks[..., None] * block + torch.arange(block, device=picks.device)).flatten(1)
    return below.where((below >= 0) & (below < nodes), -1)


def _best(scores: Tensor, alive: Tensor, top_k: int) -> Tensor:
    """Places of the `top_k` largest scores of each row, ascending, of equals the first; past the end one too large."""
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(~alive, -torch.inf)  # a nan must show
    last = scores.topk(top_k).values[..., -1:]
    above, level = scores > last, (scores == last) & alive
    chosen = above | (level & (level.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)))
    places = torch.arange(scores.shape[-1], device=scores.device).where(chosen, scores.shape[-1])
    return places.topk(top_k, largest=False).values


dispatch.register_kernels("select_blocks", "log_linear")
