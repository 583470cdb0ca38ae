"""Attention that each token of a context receives from the prompt after it."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foveate.ops.row_attention import visible

__all__ = ["attention_received"]

MAX_SCORES = 2**25
"""Attention scores in memory at once: 128 MiB of float32."""


def attention_received(
    queries: Float[Tensor, "heads prompt dim"],
    keys: Float[Tensor, "groups rows dim"],
    at: Int[Tensor, "prompt"],
    scale: float,
    norm: Literal["l2", "l1", "entropy"] = "l2",
    counted: Bool[Tensor, "prompt"] | None = None,
    window: int | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
    lse: Float[Tensor, "heads prompt"] | None = None,
    most: int = MAX_SCORES,
) -> Float[Tensor, "rows"]:
    """Attention that each row receives from all prompt tokens.

    A prompt token attends to the rows up to its own, with the mean over heads as its attention. The sum runs in
    float32 or wider over slices of the prompt, so that memory grows with the rows only.

    Args:
        queries: Queries of the prompt, after RoPE. Head h reads the keys of group h // (heads / groups).
        keys: Keys of the context and of the prompt, after RoPE.
        at: Row of each prompt token.
        scale: Factor on q·k.
        norm: How the attention a of the prompt tokens adds up: "l2" is the root of the sum of squares, "l1" the sum,
            "entropy" the sum of -a log a.
        counted: Mask of the prompt tokens to count. None counts all of them.
        window: Number of rows visible to a prompt token, its own row included. None shows all of them.
        sinks: Logit of an attention sink for each head, which takes a share of the attention but has no row.
        lse: Log-sum-exp of each query's attention, if other processes have more rows. None: these are all.
        most: Number of attention scores in memory at once; a slice has at least one prompt token.

    Source: "InfoFlow KV", arXiv 2603.05353, eq. 7 ("l1") and the authors' code ("l2", "entropy").
    """
    (heads, prompt, _), (groups, rows, _) = queries.shape, keys.shape
    grouped = queries.unflatten(0, (groups, heads // groups))
    total = torch.zeros(rows, dtype=torch.promote_types(queries.dtype, torch.float32), device=queries.device)
    step = max(1, most // (heads * rows))
    for start in range(0, prompt, step):
        some = slice(start, start + step)
        products = scale * grouped[:, :, some].flatten(1, 2) @ keys.mT  # all heads of a group at once
        hidden = ~visible(at[some], rows, window)
        scores = products.unflatten(1, (heads // groups, -1)).masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            logits = sinks.to(scores.dtype).view(groups, -1, 1, 1)
            scores = torch.cat([scores, logits.expand(*scores.shape[:3], 1)], -1)
        if lse is None:
            shares = scores.softmax(-1, dtype=total.dtype)
        else:
            shares = (scores.to(total.dtype) - lse[:, some].unflatten(0, (groups, -1))[..., None]).exp()
        received = shares[..., :rows].mean((0, 1))
        if counted is not None:
            received *= counted[some, None]
        total += {"l2": torch.square, "l1": torch.abs, "entropy": torch.special.entr}[norm](received).sum(0)
    return total.sqrt() if norm == "l2" else total
