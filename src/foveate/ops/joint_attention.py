"""Attention over [text | image] by a sparse pattern: a block table, or log-linear attention of the image."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import dispatch
from foveate.ops.block_attention import block_attention
from foveate.ops.block_table import BlockTable
from foveate.ops.hierarchical_pooling import keys_per_query, levels_for
from foveate.ops.log_linear_attention import Options, choose_backend, enriched_levels, resolved_options
from foveate.ops.log_linear_attention import portable as portable_log_linear_attention

__all__ = ["LogLinear", "Pattern", "backend_of", "joint_attention"]

OP = "joint_log_linear_attention"


class LogLinear(NamedTuple):
    """Image queries attend to the image log-linearly and to all of the text; text queries attend to everything.

    Lengths are stored as lengths of tensors, so that compiled code is not recompiled for every text length.

    Attributes:
        text: Any tensor with one entry per text token.
        image: Any tensor with one entry per image token.
        options: Keyword arguments of `log_linear_attention`: at least `top_k`, `block_size`, `levels` and `enrich`.
    """

    text: Tensor
    image: Tensor
    options: dict[str, Any]

    def keys(self) -> int:
        """Largest number of image keys, tokens and means, that an image query reads."""
        tokens = len(self.image)
        top_k, block_size, levels, enrich = (
            self.options[name] for name in ("top_k", "block_size", "levels", "enrich")
        )
        levels = levels_for(tokens, top_k, block_size, levels)
        return keys_per_query(tokens, top_k, block_size, levels, enriched_levels(levels, enrich))

    def pairs(self) -> int:
        """Largest number of pairs of a query and a key (a token or a mean)."""
        text, image = len(self.text), len(self.image)
        return text * (text + image) + image * (text + self.keys())

    def sparsity(self) -> float:
        """Skipped fraction of the pairs of dense attention; negative if means add more pairs."""
        return 1 - self.pairs() / self.query_tokens**2

    @property
    def query_tokens(self) -> int:
        """Number of tokens of text and image."""
        return len(self.text) + len(self.image)

    def borders(self) -> list[int]:
        """Positions that merged regions must not cross: none, because blocks are cut after merging."""
        return []

    def merged(self, image: int) -> "LogLinear":
        """The same pattern for an image with `image` tokens after merging."""
        return self._replace(image=self.image[:image])


Pattern = BlockTable | LogLinear
"""Which tokens attend to which."""


def joint_attention(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys head_dim"],
    pattern: Pattern,
    scatter: Int[Tensor, "queries"] | None = None,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Attention over [text | image] by a pattern.

    Args:
        q: Queries, after normalization and RoPE, text first.
        k: Keys, after normalization and RoPE, text first. A log-linear pattern allows more keys than queries: all keys
            before the image keys count as text.
        v: Values, text first.
        pattern: Pattern for this number of tokens.
        scatter: Position of each query in the output, as `block_attention` takes it.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 10 + 1024, 64)
        >>> options = {"top_k": 8, "block_size": 16, "levels": None, "enrich": True}
        >>> joint_attention(q, k, v, LogLinear(torch.empty(10), torch.empty(1024), options)).shape
        torch.Size([1, 2, 1034, 64])
    """
    if torch.is_autocast_enabled(q.device.type):  # like scaled_dot_product_attention
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if isinstance(pattern, BlockTable):
        return block_attention(q, k, v, pattern, scatter=scatter)
    image = len(pattern.image)
    options = resolved_options(*(x[:, :, -image:] for x in (q, k, v)), **pattern.options)
    return choose_backend(q.device, q.dtype, q.shape[3], options.top_k, OP).run(q, k, v, image, scatter, options)


@dispatch.register(OP, "portable")
def portable(q: Tensor, k: Tensor, v: Tensor, image: int, scatter: Tensor | None, options: Options) -> Tensor:
    """`joint_attention` for a log-linear pattern of the last `image` tokens, in plain PyTorch."""
    text_q, text_k, text_v = (x[:, :, :-image] for x in (q, k, v))
    images = (x[:, :, -image:] for x in (q, k, v))
    extra = (text_k, text_v) if text_k.shape[2] else (None, None)
    out = portable_log_linear_attention(*images, *extra, None, None, options)[0]
    if text_q.shape[2]:
        out = torch.cat([scaled_dot_product_attention(text_q, k, v, scale=options.scale), out], 2)
    return out if scatter is None else torch.empty_like(out).index_copy(2, scatter, out)


def backend_of(pattern: Pattern, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Name of the backend that runs `joint_attention` for these inputs."""
    if isinstance(pattern, BlockTable):
        return dispatch.choose("block_attention", device, dtype, head_dim).name
    return choose_backend(device, dtype, head_dim, pattern.options["top_k"]).name


dispatch.register_kernels(OP, "log_linear")
