"""Attention modules for your own models."""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from foveate.ops.hierarchical_pooling import MAX_LEVELS, Selection, check_head_dim, check_options
from foveate.ops.log_linear_attention import enriched_levels, log_linear_attention

__all__ = ["LogLinearAttention"]


class LogLinearAttention(nn.Module):
    """Self-attention with projections, by `foveate.ops.log_linear_attention`.

    With ``enrich=False`` and `top_k` at least the number of blocks, it is exactly dense attention. Neighbours in the
    sequence should be neighbours in the image: reorder tokens by `foveate.ops.curves` once, at the start of the model,
    and restore the order at its end.

    Args:
        dim: Channels of a token.
        heads: Number of heads, of 32 to 256 channels each.
        top_k: Number of nodes that each node picks.
        block_size: Tokens of a block: 16, 32 or 64.
        levels: Number of pooled levels, 1 to 4; None chooses by the number of tokens.
        enrich: Whether to read the means of nodes. An integer n reads only those of levels 1 to n.
        reweight: Whether a mean counts once for each of its tokens.
        exclude_selected: Whether to skip the means of nodes that are read in finer form.
        qk_norm: Whether to apply RMSNorm to queries and keys, per head.
        bias: Whether the projections have a bias.

    Raises:
        ValueError: If `dim` is not a multiple of `heads`, or an option is out of range.

    Examples:
        >>> attention = LogLinearAttention(128, heads=2)
        >>> attention(torch.randn(1, 5000, 128)).shape
        torch.Size([1, 5000, 128])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        top_k: int = 8,
        block_size: int = 16,
        levels: int | None = None,
        enrich: bool | int = True,
        reweight: bool = True,
        exclude_selected: bool = False,
        qk_norm: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{dim} channels cannot be split into {heads} heads: use a divisor of {dim}")
        check_head_dim(dim // heads)
        check_options(top_k, block_size, levels)
        enriched_levels(levels or MAX_LEVELS, enrich)
        self.heads = heads
        self.attend = partial(
            log_linear_attention,
            top_k=top_k,
            block_size=block_size,
            levels=levels,
            enrich=enrich,
            reweight=reweight,
            exclude_selected=exclude_selected,
        )
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=bias) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        *,
        rope: tuple[Float[Tensor, "tokens head_dim"], Float[Tensor, "tokens head_dim"]] | None = None,
        context: Float[Tensor, "batch extra dim"] | None = None,
        key_padding_mask: Bool[Tensor, "batch tokens"] | None = None,
        selection: Selection | None = None,
        return_selection: bool = False,
    ) -> Float[Tensor, "batch tokens dim"] | tuple[Float[Tensor, "batch tokens dim"], Selection]:
        """The output of attention [batch, tokens, dim], and with `return_selection` the selection.

        Args:
            x: Tokens.
            rope: (cos, sin) of the rotary embedding of queries and keys. Channels 2i and 2i + 1 are a pair; both of
                their columns hold the angle of the pair.
            context: Additional tokens that every token reads, such as those of a text, without rotary embedding.
            key_padding_mask: True where a token is real.
            selection: Selection of another call, layer or step, to read the same blocks.
            return_selection: Whether to return the selection.

        Raises:
            ValueError: If `rope` does not match the tokens or heads, or `log_linear_attention` refuses the arguments.
        """
        q, k, v = self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x))
        q, k = self._norm(self.q_norm, q), self._norm(self.k_norm, k)
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        extra_k = extra_v = None
        if context is not None:
            extra_v = self._split(self.v(context))
            extra_k = self._norm(self.k_norm, self._split(self.k(context))).to(v.dtype)
        mixed, _, selection = self.attend(
            *(q.to(v.dtype), k.to(v.dtype), v),
            extra_k=extra_k,
            extra_v=extra_v,
            key_padding_mask=key_padding_mask,
            selection=selection,
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return (out, selection) if return_selection else out

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.to(self.q.weight.dtype))  # under autocast x is narrower than the weights


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.shape[3] % 2:
        raise ValueError(f"rope rotates pairs of channels, but heads have {x.shape[3]}: use an even head_dim")
    if cos.shape != x.shape[2:] or sin.shape != x.shape[2:]:
        raise ValueError(f"cos and sin must be {list(x.shape[2:])}, not {list(cos.shape)} and {list(sin.shape)}")
    quarter_turn = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(3)
    return x * cos + quarter_turn * sin
