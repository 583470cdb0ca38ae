# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Output of log-linear attention and gradient of its queries on NVIDIA GPUs: launches of the Triton kernels."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foveate.kernels.block.block_attention import like
from foveate.kernels.log_linear import triton_log_linear
from foveate.kernels.log_linear.hierarchical_pooling import Means

__all__ = ["Keys", "Shape", "at_most", "backward_queries", "forward", "shape_of"]

SMALLEST_DOT = 16  # a side of a matrix product


class Shape(NamedTuple):
    """Of a kernel.

    Attributes:
        rows: Of a program.
        step: Keys of a wide step.
        small: Keys of a small step, of one block of queries.
        warps: Of a program.
        stages: Of its pipeline.
        registers: Of a thread at most, so that more programs fit side by side; None lets the compiler choose.
        small_stages: Of the pipeline of small steps.
    """

    rows: int
    step: int
    small: int
    warps: int
    stages: int
    registers: int | None
    small_stages: int = 2


# By the size of a head, up to which they serve: the fastest that hardly spill.
FORWARD = {64: Shape(64, 64, 32, 4, 2, 96), 128: Shape(64, 32, 16, 4, 2, None), 256: Shape(64, 32, 16, 8, 2, None)}
BACKWARD_QUERIES = FORWARD | {64: Shape(64, 64, 32, 4, 2, 128)}


def shape_of(shapes: dict[int, Shape], dim: int) -> Shape:
    """Of a kernel for heads of that size."""
    return next(shape for largest, shape in shapes.items() if dim <= largest)


def at_most(shape: Shape) -> dict[str, int]:
    """So many registers: an option of a launch."""
    return {} if shape.registers is None else {"maxnreg": shape.registers}


class Keys(NamedTuple):
    """All that queries may read, and what says which of it they do.

    Attributes:
        k: Keys [batch, heads, tokens, dim], like all tensors here with the entries of a token side by side.
        v: Values.
        extra_k: Keys that every query reads [batch, heads, extra, dim]; of no tokens where there are none.
        extra_v: Their values.
        means: Of keys and values, the last two of its tensors.
        lists: For each level, the finest first, which nodes each node picked: int32 [batch, heads, nodes, picks].
        real: [batch, tokens], False where a token is padding.
        block: Tokens of a block.
        top_k: Picks of a node, where there are as many.
        enriched: Of how many levels means are read, from the finest on.
        reweight: Whether a mean counts as often as it has tokens.
        exclude: Leave out means of what a query's own ancestors picked.
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
    out, lse = like(q), _numbers_of(q)
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v, "o": out}
    _launch(triton_log_linear.forward, FORWARD, strided, keys, p_lse=lse)
    return out, lse


def backward_queries(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the queries, and of each query its LSE in base 2 and sum(out * grad_out) - grad_lse.

    The LSE is infinite where a query gives no weight.
    """
    dq, binary, delta = like(q), _numbers_of(q), _numbers_of(q)
    strided = {"q": q, "k": keys.k, "v": keys.v, "ek": keys.extra_k, "ev": keys.extra_v}
    strided |= {"o": out, "g": grad_out, "d": dq}
    vectors = {"p_lse": lse, "p_dlse": grad_lse, "p_binary": binary, "p_delta": delta}
    _launch(triton_log_linear.backward_queries, BACKWARD_QUERIES, strided, keys, **vectors, factor=keys.scale)
    return dq, binary, delta


def real(keys: Keys) -> Tensor:
    """Which tokens are real, or where all are, anything."""
    return keys.means.counts if keys.real is None else keys.real.view(torch.uint8)


def batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or len(x) == 1 else x.stride(0)


def far(tensors: Iterable[Tensor]) -> bool:
    """Whether an entry of a head may be further than 32 bits from its first."""
    return any(x.stride(2) * x.shape[2] >= 2**31 for x in tensors)


def padded(dim: int) -> int:
    return max(SMALLEST_DOT, triton.next_power_of_2(dim))


def _launch(kernel: Any, shapes: dict[int, Shape], strided: dict[str, Tensor], keys: Keys, **more: Any) -> None:
    """Launch a kernel over groups of queries; pointers and strides are named as the kernel names them."""
    batch, heads, tokens, dim = strided["q"].shape
    shape = shape_of(shapes, dim)
    logs, lists = keys.means.logs, keys.lists + keys.lists[:1] * (4 - len(keys.lists))
    strides = {f"s_{name}{axis}": x.stride(i) for name, x in strided.items() for i, axis in enumerate(("b", "h", ""))}
    names = {"o": "p_out", "d": "p_dq"}
    kernel[(batch * heads * triton.cdiv(tokens, shape.rows),)](
        **{names.get(name, f"p_{name}"): x for name, x in strided.items()},
        **strides,
        **{f"p_list{i + 1}": x for i, x in enumerate(lists)},
        **more,
        p_mk=keys.means.of[-2],
        p_mv=keys.means.of[-1],
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
        EVEN=_even(keys, tokens, shape),
        EXTRA=keys.extra_k.shape[2] > 0,
        B=keys.block,
        M=shape.rows,
        BN=_wide(keys, shape),
        BK=_small(keys, shape),
        D=dim,
        BD=padded(dim),
        FAR=far(strided.values()),
        STAGES=shape.stages,
        SMALL_STAGES=shape.small_stages,
        num_warps=shape.warps,
        **at_most(shape),
    )


def _wide(keys: Keys, shape: Shape) -> int:
    """Keys of a wide step."""
    return max(shape.step, keys.block)


def _small(keys: Keys, shape: Shape) -> int:
    """Blocks of a small step."""
    return max(shape.small // keys.block, 1)


def _even(keys: Keys, tokens: int, shape: Shape) -> bool:
    """Whether all nodes, lists and steps are full, so that nothing needs to be looked at for being there."""
    levels, wide = len(keys.lists), _wide(keys, shape)
    whole = (
        keys.full
        and keys.real is None
        and not keys.exclude
        and tokens % keys.block**levels == 0
        and tokens % shape.rows == 0
    )
    top, picks = tokens // keys.block**levels, [chosen.shape[3] for chosen in keys.lists]
    steps = [picks[0] * keys.block % (_small(keys, shape) * keys.block)]
    if keys.enriched == levels:
        steps.append(top % wide)
    steps += [above * keys.block % wide for above in picks[1 : keys.enriched + 1]]
    return whole and not any(steps)


def _numbers_of(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)
