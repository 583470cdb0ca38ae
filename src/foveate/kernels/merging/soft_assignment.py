# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Facility location and soft assignment in one launch: one program per set, with similarities in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, gpu_op, launcher, padded_size, row_contiguous

__all__ = ["BACKENDS", "soft_assignment"]

CONFIGS = {16: (128, 1), 32: (128, 2), 64: (128, 4), 128: (32, 8)}
"""Channels of a step and warps of a program, by the padded size of a set.

Larger sets are not supported: the similarities of 256 tokens would fill the registers of a multiprocessor."""
STAGES = 1  # with more, Triton 3.6 overwrites channels that a product of 64 tokens still reads
NEARLY = tl.constexpr(1e-5)  # as in the portable path


@triton.jit
def _similarities(p_x, tokens, dim, s_token, T: tl.constexpr, BC: tl.constexpr):
    """Cosine similarities of all pairs of tokens [T, T]; 0 for padding."""
    o_t, o_c = tl.arange(0, T), tl.arange(0, BC)
    similar = tl.zeros([T, T], tl.float32)
    length = tl.zeros([T], tl.float32)
    for first in range(0, dim, BC):
        m_x = (o_t < tokens)[:, None] & (first + o_c < dim)[None, :]
        x = tl.load(p_x + o_t[:, None] * s_token + first + o_c[None, :], mask=m_x, other=0.0)  # [T, BC]
        similar = tl.dot(x, tl.trans(x), similar, input_precision="ieee")
        length += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    length = tl.maximum(tl.sqrt(length), 1e-12)
    return similar / (length[:, None] * length[None, :])


@triton.jit
def _greedy(similar, tokens, budget, T: tl.constexpr):
    """Mask of the selected tokens [T]; column j of the similarities is the coverage of each row by token j."""
    o_t = tl.arange(0, T)
    exists = o_t < tokens
    gains = tl.sum(similar, 0)
    left = exists
    served = tl.where(exists, -float("inf"), 0.0)
    for _ in range(0, budget):
        best = tl.max(tl.where(left, gains, -float("inf")), 0)
        pick = tl.argmax((left & (gains >= best - NEARLY * tl.abs(best))).to(tl.int32), 0)  # the first
        left = left & (o_t != pick)
        served = tl.maximum(served, tl.sum(tl.where((o_t == pick)[None, :], similar, 0.0), 1))
        gains = tl.sum(tl.maximum(similar - served[:, None], 0.0), 0)
    return exists & (left == 0)


@triton.jit
def _assign(
    p_x, p_given, p_picks, p_gather, p_spread, tokens, dim, budget, scale, s_set, s_token,
    GIVEN: tl.constexpr, T: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Select destinations, unless they are GIVEN, and compute the weights of all tokens over them."""
    index = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, T)
    similar = _similarities(p_x + index * s_set, tokens, dim, s_token, T, BC)
    if GIVEN:
        given = tl.load(p_given + index * budget + o_t, mask=o_t < budget, other=-1)
        taken = tl.sum((o_t[:, None] == given[None, :]).to(tl.int32), 1) > 0
    else:
        taken = _greedy(similar, tokens, budget, T)
    rank = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(p_picks + index * budget + rank, o_t.to(tl.int64), mask=taken)
    scores = tl.where(taken[:, None], similar * scale, -float("inf"))  # [picks in their places, tokens]
    weights = tl.exp(scores - tl.max(scores, 0)[None, :])
    weights = tl.where((o_t < tokens)[None, :], weights / tl.sum(weights, 0)[None, :], 0.0)
    o_w = (index * budget + rank[:, None]) * tokens + o_t[None, :]
    m_w = taken[:, None] & (o_t < tokens)[None, :]
    tl.store(p_spread + o_w, weights.to(p_spread.dtype.element_ty), mask=m_w)
    mean = weights / tl.where(taken, tl.sum(weights, 1), 1.0)[:, None]
    tl.store(p_gather + o_w, mean.to(p_gather.dtype.element_ty), mask=m_w)


def supports(device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
    """Whether the kernel runs: an NVIDIA GPU, any dtype but float64, sets of at most 128 tokens."""
    return device.type == "cuda" and dtype != torch.float64 and tokens <= max(CONFIGS)


@gpu_op("soft_assignment")
def soft_assignment(
    sets: Tensor, budget: int, scale: float, destinations: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks and weights of `foveate.ops.soft_assignment` for sets [sets, tokens, dim]."""
    sets = row_contiguous(sets)
    picks, gather, spread = _like(sets, budget, scale, destinations)
    _launch(sets, None if destinations is None else destinations.contiguous(), picks, gather, spread, scale)
    return picks, gather, spread


@launcher
def _launch(sets: Tensor, given: Tensor | None, picks: Tensor, gather: Tensor, spread: Tensor, scale: float) -> Launch:
    number, tokens, dim = sets.shape
    channels, warps = CONFIGS[padded_size(tokens)]
    args = (
        sets, picks if given is None else given, picks, gather, spread, tokens, dim, picks.shape[1], scale,
        *sets.stride()[:2],
    )  # fmt: skip
    constants = {
        "GIVEN": given is not None, "T": padded_size(tokens), "BC": channels, "num_warps": warps, "num_stages": STAGES
    }  # fmt: skip
    return Launch(_assign, (number,), args, constants)


@torch.library.register_fake(soft_assignment)
def _like(
    sets: Tensor, budget: int, scale: float, destinations: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = sets.shape[0], budget, sets.shape[1]
    picks = sets.new_empty(weights[:2], dtype=torch.long)
    return picks, sets.new_empty(weights), sets.new_empty(weights)


BACKENDS = {"triton": (supports, soft_assignment)}
