"""Attention over [text | image], by a block table or by what image queries pick themselves."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foveate.ops import dispatch
from foveate.ops.block_attention import block_attention
from foveate.ops.block_table import BlockTable
from foveate.ops.hierarchical_pooling import keys_in_sight, levels_for
from foveate.ops.log_linear_attention import choose_backend, enriched_levels, log_linear_attention

__all__ = ["LogLinear", "Pattern", "backend_of", "joint_attention"]


class LogLinear(NamedTuple):
    """Image queries attend to the image log-linearly and to all of the text; text queries attend to everything.

    Its lengths are those of tensors, so that compiled code need not be built again for every length of a text.

    Attributes:
        text: As long as the text.
        image: As long as the image.
        options: Keyword arguments of `log_linear_attention`, at least `top_k`, `block_size`, `levels` and `enrich`.
    """

    text: Tensor
    image: Tensor
    options: dict[str, Any]

    def keys(self) -> int:
        """How many keys of the image, tokens and means, an image query reads at most."""
        tokens = len(self.image)
        top_k, block_size, levels, enrich = (
            self.options[name] for name in ("top_k", "block_size", "levels", "enrich")
        )
        levels = levels_for(tokens, top_k, block_size, levels)
        return keys_in_sight(tokens, top_k, block_size, levels, enriched_levels(levels, enrich))

    def pairs(self) -> int:
        """How many pairs of a query and a key, a token or a mean, there are at most."""
        text, image = len(self.text), len(self.image)
        return text * (text + image) + image * (text + self.keys())

    def sparsity(self) -> float:
        """Fraction of dense attention's pairs that is left out; below 0 where means make more of them."""
        return 1 - self.pairs() / self.query_tokens**2

    @property
    def query_tokens(self) -> int:
        """Number of tokens."""
        return len(self.text) + len(self.image)

    def borders(self) -> list[int]:
        """None that tokens must not merge across: blocks are cut from what is left of them."""
        return []

    def merged(self, image: int) -> "LogLinear":
        """The same for an image that so many tokens are left of."""
        return self._replace(image=self.image[:image])


Pattern = BlockTable | LogLinear
"""What says who attends to whom."""


def joint_attention(
    q: Float[Tensor, "batch heads tokens head_dim"],
    k: Float[Tensor, "batch heads tokens head_dim"],
    v: Float[Tensor, "batch heads tokens head_dim"],
    pattern: Pattern,
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """What each token of [text | image] takes from those that the pattern lets it attend to.

    Args:
        q: Queries, after normalisation and RoPE, the text in front.
        k: Keys, likewise.
        v: Values.
        pattern: For so many tokens.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 10 + 1024, 64)
        >>> options = {"top_k": 8, "block_size": 16, "levels": None, "enrich": True}
        >>> joint_attention(q, k, v, LogLinear(torch.empty(10), torch.empty(1024), options)).shape
        torch.Size([1, 2, 1034, 64])
    """
    if torch.is_autocast_enabled(q.device.type):  # PyTorch's own attention does so too
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if isinstance(pattern, BlockTable):
        return block_attention(q, k, v, pattern)
    text = len(pattern.text)
    if not text:
        return log_linear_attention(q, k, v, **pattern.options).out
    image_q, image_k, image_v = (x[:, :, text:] for x in (q, k, v))
    beside = {"extra_k": k[:, :, :text], "extra_v": v[:, :, :text]}
    image = log_linear_attention(image_q, image_k, image_v, **beside, **pattern.options).out
    return torch.cat([scaled_dot_product_attention(q[:, :, :text], k, v), image], 2)


def backend_of(pattern: Pattern, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of what runs `joint_attention` there."""
    if isinstance(pattern, BlockTable):
        return dispatch.choose("block_attention", device, dtype, head_dim).name
    options = pattern.options
    return choose_backend(device, dtype, head_dim, options["top_k"], options.get("log_mass", False)).name
