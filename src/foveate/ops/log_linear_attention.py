"""Log-linear attention: each query reads a few blocks of tokens in full, and the other tokens as means.

The portable path below is the definition of the op. It runs on any device, in memory linear in the number of tokens.
"""

from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from foveate.ops import dispatch
from foveate.ops.hierarchical_pooling import (
    MAX_KERNEL_TOP_K,
    Selection,
    check_inputs,
    choose_blocks,
    count_tokens,
    pool,
)
from foveate.ops.picked_attention import picked_attention

__all__ = [
    "LogLinearOutput",
    "Options",
    "choose_backend",
    "enriched_levels",
    "log_linear_attention",
    "portable",
    "resolved_options",
]


class LogLinearOutput(NamedTuple):
    """Result of `log_linear_attention`.

    Attributes:
        out: Output [batch, heads, tokens, head_dim], in the dtype of q.
        lse: Per-query log-sum-exp [batch, heads, tokens], float32 (float64 for float64).
        selection: Selected blocks; pass it to another call to read the same blocks.
    """

    out: Tensor
    lse: Tensor
    selection: Selection


class Options(NamedTuple):
    """Options of `log_linear_attention` for its backends, with all defaults resolved.

    Attributes:
        top_k: Number of nodes that each node picks.
        block_size: Tokens of a block, and children of a node.
        levels: Number of pooled levels.
        enriched: Number of levels with means to read, from the finest.
        reweight: Whether a mean counts once for each of its tokens.
        scale: Factor on q·k.
        exclude_selected: Whether to skip means of nodes that are read at a finer level.
        full: Whether lists are known to have no -1, even before they are chosen.
    """

    top_k: int
    block_size: int
    levels: int
    enriched: int
    reweight: bool
    scale: float
    exclude_selected: bool
    full: bool = False


def log_linear_attention(
    q: Float[Tensor, "batch heads tokens head_dim"],
    k: Float[Tensor, "batch heads tokens head_dim"],
    v: Float[Tensor, "batch heads tokens head_dim"],
    *,
    top_k: int = 8,
    block_size: int = 16,
    levels: int | None = None,
    selection: Selection | None = None,
    enrich: bool | int = True,
    reweight: bool = True,
    scale: float | None = None,
    extra_k: Float[Tensor, "batch heads extra head_dim"] | None = None,
    extra_v: Float[Tensor, "batch heads extra head_dim"] | None = None,
    key_padding_mask: Bool[Tensor, "batch tokens"] | None = None,
    exclude_selected: bool = False,
) -> LogLinearOutput:
    """Attention of every query over its selected blocks and over the means of coarser nodes, in one softmax.

    `select_blocks` picks the nodes. A query reads the tokens of the blocks that its block picked, the means of all
    nodes of the top level, and on each level below, the means of all candidates of its ancestor's choice. A mean
    counts once for each of its tokens: log(count) is added to its score.

    Differentiable once in q, k, v, extra_k and extra_v, also through the LSE, but not through the picks. Works with
    `torch.compile(fullgraph=True)`.

    Args:
        q: Queries, after normalization and RoPE.
        k: Keys, after normalization and RoPE.
        v: Values.
        top_k: Number of nodes that each node picks; all of them if there are fewer.
        block_size: Tokens of a block, and children of a node: 16, 32 or 64.
        levels: Number of pooled levels, 1 to 4. None takes it from `selection`, or from `automatic_levels`.
        selection: Selection of an earlier call or of `select_blocks`, to read the same blocks again.
        enrich: Whether to read means. An integer n limits them to levels 1 to n.
        reweight: Whether a mean counts once for each of its tokens; otherwise it counts as one key.
        scale: Factor on q·k; ``head_dim ** -0.5`` if None.
        extra_k: Additional keys that every query reads, such as text keys.
        extra_v: Values of the additional keys.
        key_padding_mask: True where a token is real. Padding is in no mean and is never read; its output is 0 and its
            LSE -inf.
        exclude_selected: Skip the means of nodes that a query's ancestors picked, so that no token counts twice.

    Raises:
        ValueError: If the tensors do not match each other or the selection, or an option is out of range.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 9000, 64)
        >>> out, lse, selection = log_linear_attention(q, k, v)
        >>> out.shape, selection.levels
        (torch.Size([1, 2, 9000, 64]), 2)
        >>> again = log_linear_attention(q, k, v, selection=selection)
        >>> torch.equal(again.out, out)
        True

    Source: arXiv 2512.16615. A shorter last node counts by its true number of tokens.
    """
    if levels is None and selection is not None:
        levels = selection.levels
    options = resolved_options(
        q, k, v, top_k=top_k, block_size=block_size, levels=levels, enrich=enrich, reweight=reweight, scale=scale,
        key_padding_mask=key_padding_mask, exclude_selected=exclude_selected,
    )  # fmt: skip
    if extra_k is not None or extra_v is not None:
        _check_extra(q, extra_k, extra_v)
    if selection is not None:
        _check_selection(q, selection, top_k, block_size, options.levels)
        options = options._replace(full=selection.full)
    run = choose_backend(q.device, q.dtype, q.shape[3], top_k).run
    lists = None if selection is None else list(selection.lists)
    out, lse, lists, counts = run(q, k, v, extra_k, extra_v, key_padding_mask, lists, options)
    if selection is None:
        selection = Selection(tuple(lists), tuple(counts), q.shape[2], block_size, top_k, options.full)
    return LogLinearOutput(out, lse, selection)


def resolved_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    top_k: int = 8,
    block_size: int = 16,
    levels: int | None = None,
    enrich: bool | int = True,
    reweight: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    exclude_selected: bool = False,
) -> Options:
    """Options of a call of `log_linear_attention` with these tensors, checked.

    Raises:
        ValueError: If the tensors do not match each other, or an option is out of range.
    """
    levels = check_inputs({"q": q, "k": k, "v": v}, top_k, block_size, levels, key_padding_mask)
    enriched = enriched_levels(levels, enrich)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    if not 0 < scale < inf:
        raise ValueError(f"scale must be finite and above 0, not {scale}: None takes head_dim ** -0.5")
    full = key_padding_mask is None
    return Options(top_k, block_size, levels, enriched, reweight, scale, exclude_selected, full)


def enriched_levels(levels: int, enrich: bool | int) -> int:
    """Number of levels with means to read.

    Raises:
        ValueError: If `enrich` is more than the number of levels.
    """
    if not isinstance(enrich, int) or not 0 <= enrich <= levels:
        raise ValueError(f"enrich must be True, False, or a number of levels up to {levels}, not {enrich!r}")
    return levels if enrich is True else int(enrich)


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, top_k: int, op: str = "log_linear_attention"
) -> dispatch.Backend:
    """Backend of `op` for a call with these options; kernels limit `top_k`."""
    return dispatch.choose(op, device, dtype, head_dim, portable=top_k > MAX_KERNEL_TOP_K)


def _check_extra(q: Tensor, extra_k: Tensor | None, extra_v: Tensor | None) -> None:
    if extra_k is None or extra_v is None:
        raise ValueError(f"pass both extra_k and extra_v, or neither: extra_{'v' if extra_v is None else 'k'} is None")
    fits = extra_k.ndim == 4 and (*extra_k.shape[:2], extra_k.shape[3]) == (*q.shape[:2], q.shape[3])
    if extra_v.shape != extra_k.shape or not fits:
        raise ValueError(
            f"extra_k and extra_v must be [{q.shape[0]}, {q.shape[1]}, extra, {q.shape[3]}] like q: got "
            f"{list(extra_k.shape)} and {list(extra_v.shape)}"
        )
    if any((x.dtype, x.device) != (q.dtype, q.device) for x in (extra_k, extra_v)):
        raise ValueError(
            f"extra_k and extra_v must be {q.dtype} on {q.device} like q: got {extra_k.dtype} on {extra_k.device} and "
            f"{extra_v.dtype} on {extra_v.device}"
        )


def _check_selection(q: Tensor, selection: Selection, top_k: int, block_size: int, levels: int) -> None:
    finest = selection.lists[0]
    made = *finest.shape[:2], selection.tokens, selection.block_size, selection.top_k, selection.levels, finest.device
    used = *q.shape[:3], block_size, top_k, levels, q.device
    if made != used:
        names = "batch", "heads", "tokens", "block_size", "top_k", "levels", "device"
        wrong = ", ".join(f"{n}={a} not {b}" for n, a, b in zip(names, made, used, strict=True) if a != b)
        raise ValueError(f"the selection was made for {wrong}: pass it to a matching call, or select blocks again")


# --- the portable path -----------------------------------------------------------------------------------------------


@dispatch.register("log_linear_attention", "portable")
def portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    real: Tensor | None,
    lists: list[Tensor] | None,
    options: Options,
) -> tuple[Tensor, Tensor, list[Tensor], tuple[Tensor, ...]]:
    """`log_linear_attention` in plain PyTorch: output, LSE, and the lists and counts of a `Selection`."""
    block, enriched = options.block_size, options.enriched
    if real is not None:
        q, k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (q, k, v))
    counts = count_tokens(k, real, block, options.levels)
    means = pool(k, counts, block)
    if lists is None:
        lists = choose_blocks(q, [mean.to(k.dtype) for mean in means], counts, options.top_k, block)
    extra_k, extra_v = (x[:, :, :0] if extra is None else extra for x, extra in ((k, extra_k), (v, extra_v)))
    shared_k = [*(mean.to(k.dtype) for mean in means[:enriched]), extra_k]
    shared_v = [*(mean.to(v.dtype) for mean in pool(v, counts[:enriched], block)), extra_v]
    bias = _bias(counts, extra_k.shape[2], options, means[0].dtype)
    out, lse = picked_attention(
        *(q, k, v, torch.cat(shared_k, 2), torch.cat(shared_v, 2), bias, real, lists, block, enriched),
        *(options.exclude_selected, options.scale),
    )
    if real is not None:
        out, lse = out.masked_fill(~real[:, None, :, None], 0), lse.masked_fill(~real[:, None], -torch.inf)
    return out, lse, lists, counts


def _bias(counts: tuple[Tensor, ...], ones: int, options: Options, dtype: torch.dtype) -> Tensor:
    """Log-weights of means and extra keys [sets, shared]; the mean of an empty node gets -inf."""
    weights = torch.cat([*counts[: options.enriched], counts[0].new_ones(len(counts[0]), ones)], 1)
    return (weights if options.reweight else weights.clamp(max=1)).to(dtype).log()


dispatch.register_kernels("log_linear_attention", "log_linear")
