# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""Facility location in one launch: one program selects from one set and rereads its similarities for every pick."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.kernels.launch import Launch, gpu_op, launcher, padded_size

__all__ = ["BACKENDS", "facility_location"]

LARGEST = 1024  # tokens of a set
AT_ONCE, WARPS = 8192, 16  # similarities in a program at once, and its warps
NEARLY = tl.constexpr(1e-5)  # as in the portable path


@triton.jit
def _pick(p_s, p_picks, tokens, budget, T: tl.constexpr, BC: tl.constexpr):
    """Picks of one set, in the order of selection."""
    index = tl.program_id(0).to(tl.int64)
    p_s += index * tokens * tokens
    o_t, o_c, o_k = tl.arange(0, T), tl.arange(0, BC), tl.arange(0, T // BC)
    left = o_t < tokens
    served = tl.zeros([T], tl.float32)
    for number in range(0, budget):
        gains = tl.zeros([T // BC, BC], tl.float32)
        for chunk in range(0, T // BC):
            o_j = chunk * BC + o_c
            m_s = (o_t < tokens)[:, None] & (o_j < tokens)[None, :]
            similar = tl.load(p_s + o_t[:, None] * tokens + o_j[None, :], mask=m_s, other=0.0)  # [T, BC]
            more = similar - served[:, None]
            gain = tl.sum(tl.where(number == 0, more, tl.maximum(more, 0.0)), 0)
            gains = tl.where(o_k[:, None] == chunk, gain[None, :], gains)
        gain = tl.where(left, tl.reshape(gains, [T]), -float("inf"))
        best = tl.max(gain, 0)
        pick = tl.argmax((left & (gain >= best - NEARLY * tl.abs(best))).to(tl.int32), 0)  # the first
        tl.store(p_picks + index * budget + number, pick.to(tl.int64))
        left = left & (o_t != pick)
        by_pick = tl.load(p_s + o_t * tokens + pick, mask=o_t < tokens, other=0.0)
        served = tl.where(number == 0, by_pick, tl.maximum(served, by_pick))


def supports(device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
    """Whether the kernel runs: an NVIDIA GPU, float32, sets of at most 1,024 tokens."""
    return device.type == "cuda" and dtype == torch.float32 and tokens <= LARGEST


@gpu_op("facility_location")
def facility_location(similarity: Tensor, budget: int) -> Tensor:
    """Picks of `foveate.ops.facility_location` from similarities [sets, tokens, tokens]."""
    similarity = similarity.contiguous()
    picks = _like(similarity, budget)
    _launch(similarity, picks)
    return picks


@launcher
def _launch(similarity: Tensor, picks: Tensor) -> Launch:
    number, tokens, _ = similarity.shape
    padded = padded_size(tokens)
    constants = {"T": padded, "BC": min(padded, AT_ONCE // padded), "num_warps": WARPS}
    return Launch(_pick, (number,), (similarity, picks, tokens, picks.shape[1]), constants)


@torch.library.register_fake(facility_location)
def _like(similarity: Tensor, budget: int) -> Tensor:
    return similarity.new_empty((similarity.shape[0], budget), dtype=torch.long)


BACKENDS = {"triton": (supports, facility_location)}
