# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Launches of the Triton kernels of log-linear attention: output, LSE and gradient of the queries."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foveate.kernels.launch import empty_like, empty_lse, padded_size
from foveate.kernels.log_linear import triton_log_linear
from foveate.kernels.log_linear.hierarchical_pooling import Means

__all__ = ["KernelConfig", "Keys", "backward_queries", "config_for", "forward", "register_limit"]

SMALL_STAGES = 2  # pipeline stages of small steps


class KernelConfig(NamedTuple):
    """Tile sizes and launch options of a kernel of log-linear attention.

    Attributes:
        rows: Queries of a program.
        step: Keys of a wide step, which all queries of the program read.
        small: Keys of a small step, which one block of queries reads.
        warps: Warps of a program.
        stages: Pipeline stages of wide steps.
        registers: Most registers of a thread, so that more programs are resident; None lets the compiler choose.
    """

    rows: int
    step: int
    small: int
    warps: int
    stages: int
    registers: int | None


# By the largest head_dim that they are for: the fastest that hardly spill registers.
FORWARD = {
    64: KernelConfig(64, 64, 32, 4, 2, 96),
    128: KernelConfig(64, 32, 16, 4, 2, None),
    256: KernelConfig(64, 32, 16, 8, 2, None),
}
BACKWARD_QUERIES = FORWARD | {64: KernelConfig(64, 64, 32, 4, 2, 128)}


def config_for(configs: dict[int, KernelConfig], head_dim: int) -> KernelConfig:
    """The configuration for a head_dim, from configurations by the largest head_dim they are for."""
    return next(config for largest, config in configs.items() if head_dim <= largest)


def register_limit(config: KernelConfig) -> dict[str, int]:
    """The launch option that limits the registers of a thread."""
    return {} if config.registers is None else {"maxnreg": config.registers}


class Keys(NamedTuple):
    """Everything that queries may read, and the options that say what they do read.

    The last dimension of all tensors [batch, heads, tokens, dim] has stride 1.

    Attributes:
        k: Keys [batch, heads, tokens, dim].
        v: Values.
        extra_k: Keys that every query reads [batch, heads, extra, dim]; extra may be 0.
        extra_v: Values of the extra keys.
        means: Means whose last two tensors are those of k and v.
        lists: Nodes that each node picked, for each level, the finest first: int32 [batch, heads, nodes, picks].
        real: Contiguous bool [batch, tokens], False where a token is padding.
        block: Tokens of a block.
        top_k: Picks of a node, if there are that many nodes.
        enriched: Number of levels, from the finest, whose means are read.
        reweight: Whether a mean counts once for each of its tokens.
        exclude: Whether queries skip the means of nodes that their own ancestors picked.
        scale: Factor on q·k, above 0.
        full: Whether lists are known to have no gaps.
    """

    k: Tensor
    v: Tensor
    extra_k: Tensor
    extra_v: Tensor
    means: Means
    lists: list[Tensor]
    real: Tensor | None
    block: int
    top_k: int
    enriched: int
    reweight: bool
    exclude: bool
    scale: float
    full: bool


def forward(q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Output, in q's layout, and natural LSE, float32 [batch, heads, tokens]."""
    out, lse = empty_like(q), empty_lse(q)
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v, "o": out}
    _launch(triton_log_linear.forward, FORWARD, strided, keys, p_lse=lse)
    return out, lse


def backward_queries(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the queries, their LSE in base 2, and sum(out * grad_out) - grad_lse of each.

    The LSE in base 2 is infinite where a query sees nothing, so that its weights are 0.
    """
    dq, binary, delta = empty_like(q), empty_lse(q), empty_lse(q)
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v}
    strided |= {"o": out, "g": grad_out, "d": dq}
    vectors = {"p_lse": lse, "p_dlse": grad_lse, "p_binary": binary, "p_delta": delta}
    _launch(triton_log_linear.backward_queries, BACKWARD_QUERIES, strided, keys, **vectors, factor=keys.scale)
    return dq, binary, delta


def real(keys: Keys) -> Tensor:
    """The mask of real tokens for a kernel, or any tensor if there is none."""
    return keys.means.counts if keys.real is None else keys.real.view(torch.uint8)


def batch_stride(x: Tensor | None) -> int:
    """Stride of the first dimension; 0 for one row that serves the whole batch."""
    return 0 if x is None or len(x) == 1 else x.stride(0)


def far(tensors: Iterable[Tensor]) -> bool:
    """Whether offsets within one head may exceed 32 bits."""
    return any(x.stride(2) * x.shape[2] >= 2**31 for x in tensors)


def _launch(
    kernel: Any, configs: dict[int, KernelConfig], strided: dict[str, Tensor], keys: Keys, **more: Any
) -> None:
    """Launch a kernel over groups of queries; arguments have the names of the kernel's parameters."""
    batch, heads, tokens, dim = strided["q"].shape
    config = config_for(configs, dim)
    logs, lists = keys.means.logs, keys.lists + keys.lists[:1] * (4 - len(keys.lists))
    strides = {f"s_{name}{axis}": x.stride(i) for name, x in strided.items() for i, axis in enumerate(("b", "h", ""))}
    names = {"o": "p_out", "d": "p_dq"}
    kernel[(batch * heads * triton.cdiv(tokens, config.rows),)](
        **{names.get(name, f"p_{name}"): x for name, x in strided.items()},
        **strides,
        **{f"p_list{i + 1}": x for i, x in enumerate(lists)},
        **more,
        p_mk=keys.means.values[-2],
        p_mv=keys.means.values[-1],
        p_logs=logs,
        p_real=real(keys),
        scale=keys.scale / math.log(2),
        heads=heads,
        tokens=tokens,
        extra=keys.extra_k.shape[2],
        nodes=logs.shape[1],
        top_k=keys.top_k,
        s_log=batch_stride(logs),
        s_real=batch_stride(keys.real),
        LEVELS=len(keys.lists),
        ENRICHED=keys.enriched,
        REWEIGHT=keys.reweight,
        EXCLUDE=keys.exclude,
        MASKED=keys.real is not None,
        EVEN=_even(keys, tokens, config),
        EXTRA=keys.extra_k.shape[2] > 0,
        B=keys.block,
        M=config.rows,
        BN=_wide(keys, config),
        BK=_small(keys, config),
        D=dim,
        BD=padded_size(dim),
        FAR=far(strided.values()),
        STAGES=config.stages,
        SMALL_STAGES=SMALL_STAGES,
        num_warps=config.warps,
        **register_limit(config),
    )


def _wide(keys: Keys, config: KernelConfig) -> int:
    """Keys of a wide step: whole blocks."""
    return max(config.step, keys.block)


def _small(keys: Keys, config: KernelConfig) -> int:
    """Blocks of a small step, at least one."""
    return max(config.small // keys.block, 1)


def _even(keys: Keys, tokens: int, config: KernelConfig) -> bool:
    """Whether all nodes, lists and steps are full, so that the kernel needs no masks."""
    levels, wide = len(keys.lists), _wide(keys, config)
    whole = (
        keys.full
        and keys.real is None
        and not keys.exclude
        and tokens % keys.block**levels == 0
        and tokens % config.rows == 0
    )
    top, picks = tokens // keys.block**levels, [chosen.shape[3] for chosen in keys.lists]
    steps = [picks[0] * keys.block % (_small(keys, config) * keys.block)]
    if keys.enriched == levels:
        steps.append(top % wide)
    steps += [above * keys.block % wide for above in picks[1 : keys.enriched + 1]]
    return whole and not any(steps)
