"""How much attention each token of a context receives from the prompt after it."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["attention_received"]

MAX_SCORES = 2**25
"""Attention scores held in memory at once: 128 MiB of float32."""


def attention_received(
    queries: Float[Tensor, "heads prompt dim"],
    keys: Float[Tensor, "groups tokens dim"],
    scale: float,
    norm: Literal["l2", "l1"] = "l2",
    most: int = MAX_SCORES,
) -> Float[Tensor, "context"]:
    """The attention that each context token receives from all prompt tokens.

    A prompt token attends to the whole context and to the prompt up to itself, with the mean over heads as its
    attention. The sum runs in float32 or wider over slices of the prompt, so that memory grows with the context only.

    Args:
        queries: Queries of the prompt, after RoPE. Head h reads the keys of group h // (heads / groups).
        keys: Keys of the context, then those of the prompt, after RoPE.
        scale: Factor on q·k.
        norm: Norm over the prompt tokens: "l2" is the root of the sum of squares, "l1" the sum.
        most: Number of attention scores to hold at once; at least those of one prompt token are held.

    Source: "InfoFlow KV", arXiv 2603.05353, eq. 7 ("l1") and the authors' code ("l2").
    """
    (heads, prompt, _), (groups, tokens, _) = queries.shape, keys.shape
    context = tokens - prompt
    grouped = queries.unflatten(0, (groups, heads // groups))
    total = torch.zeros(context, dtype=torch.promote_types(queries.dtype, torch.float32), device=queries.device)
    slices = torch.arange(prompt, device=queries.device).split(max(1, most // (heads * tokens)))
    for rows in slices:
        products = scale * grouped[:, :, rows].flatten(1, 2) @ keys.mT  # all heads of a group at once
        scores = products.unflatten(1, (-1, len(rows)))
        later = torch.arange(prompt, device=queries.device) > rows[:, None]
        scores[..., context:].masked_fill_(later, -torch.inf)
        received = scores.softmax(-1, dtype=total.dtype)[..., :context].mean((0, 1))
        total += received.square().sum(0) if norm == "l2" else received.sum(0)
    return total.sqrt() if norm == "l2" else total
