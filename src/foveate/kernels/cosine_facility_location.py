# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Facility location over cosine similarities in one launch: a program for each set, similarities in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BACKENDS", "cosine_facility_location"]

WARPS = {16: 1, 32: 1, 64: 4, 128: 8}  # by the size of a set: what holds its similarities in registers
CHANNELS = 32
NEARLY = tl.constexpr(1e-5)  # as in the portable path


@triton.jit
def _greedy(p_x, p_picks, tokens, dim, budget, s_set, s_token, T: tl.constexpr, BC: tl.constexpr):
    o_t, o_c = tl.arange(0, T), tl.arange(0, BC)
    p_x += tl.program_id(0).to(tl.int64) * s_set
    similar = tl.zeros([T, T], tl.float32)
    length = tl.zeros([T], tl.float32)
    for first in range(0, dim, BC):
        m_x = (o_t < tokens)[:, None] & (first + o_c < dim)[None, :]
        x = tl.load(p_x + o_t[:, None] * s_token + first + o_c[None, :], mask=m_x, other=0.0)  # [T, BC]
        similar = tl.dot(x, tl.trans(x), similar, input_precision="ieee")
        length += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    length = tl.maximum(tl.sqrt(length), 1e-12)
    similar = similar / (length[:, None] * length[None, :])  # [T, T]: row i is served by column j
    similar = tl.where((o_t < tokens)[:, None], similar, 0.0)
    gains = tl.sum(similar, 0)
    open_ = o_t < tokens
    served = tl.where(open_, -float("inf"), 0.0)
    for place in range(0, budget):
        best = tl.max(tl.where(open_, gains, -float("inf")), 0)
        pick = tl.argmax((open_ & (gains >= best - NEARLY * tl.abs(best))).to(tl.int32), 0)  # the first
        tl.store(p_picks + tl.program_id(0).to(tl.int64) * budget + place, pick)
        open_ = open_ & (o_t != pick)
        served = tl.maximum(served, tl.sum(tl.where((o_t == pick)[None, :], similar, 0.0), 1))
        gains = tl.sum(tl.maximum(similar - served[:, None], 0.0), 0)


def takes(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel runs there: an NVIDIA GPU, sets of at most 128 tokens."""
    return device.type == "cuda" and dtype != torch.float64 and size <= max(WARPS)


@torch.library.custom_op("foveate::cosine_facility_location", mutates_args=())
def cosine_facility_location(sets: Tensor, budget: int) -> Tensor:
    """What `foveate.ops.facility_location` defines, of [sets, tokens, dim]."""
    sets = sets if sets.stride(-1) == 1 else sets.contiguous()
    number, tokens, dim = sets.shape
    picks = torch.empty(number, budget, dtype=torch.int32, device=sets.device)
    padded = max(min(WARPS), triton.next_power_of_2(tokens))
    if number:
        _greedy[(number,)](
            sets, picks, tokens, dim, budget, *sets.stride()[:2], T=padded, BC=CHANNELS, num_warps=WARPS[padded]
        )
    return picks.long()


@cosine_facility_location.register_fake
def _(sets: Tensor, budget: int) -> Tensor:
    return sets.new_empty(sets.shape[0], budget, dtype=torch.long)


BACKENDS = {"triton": (takes, cosine_facility_location)}
