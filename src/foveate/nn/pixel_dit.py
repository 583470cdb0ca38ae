# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalCall=false
"""A diffusion transformer in pixel space: no autoencoder, a token for every pixel, dense or log-linear attention."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import TimestepEmbedding, Timesteps, get_1d_rotary_pos_embed
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZero
from jaxtyping import Float, Int
from torch import Tensor, nn

from foveate.nn import LogLinearAttention
from foveate.ops.curves import CURVES, grid_order, inverse_order
from foveate.ops.log_linear_attention import log_linear_attention

__all__ = ["MODELS", "PixelDiT", "attend_densely"]

MODELS: dict[str, dict[str, int]] = {
    "DiT-T": {"num_layers": 6, "num_attention_heads": 3},
    "DiT-XS": {"num_layers": 12, "num_attention_heads": 4},
    "DiT-S": {"num_layers": 12, "num_attention_heads": 6},
    "DiT-B": {"num_layers": 12, "num_attention_heads": 12},
}
"""Depth and width by name; a head has 64 channels."""
ATTENTIONS = "log-linear", "dense"
FREQUENCIES = 256  # channels of the sinusoidal embedding of the noise level
SPAN = 64  # side of a square image in units of the rotary embedding, at any number of tokens


class PixelDiT(ModelMixin, ConfigMixin):
    """Diffusion transformer that predicts the velocity of noisy images. Tokens are pixels or patches of pixels.

    The noise level modulates every block (adaLN-zero). Queries and keys are normalised and rotated by the row and the
    column of their token (RoPE, half of the channels each). Positions are relative to the size of the image, so a
    model trained on small images transfers to larger ones. Tokens are reordered along a curve before the first block
    and restored to raster order after the last. Text tokens are additional keys and values in every block.

    Dense and log-linear attention have the same weights. If `top_k` covers all blocks and ``enrich=False``, they also
    predict the same velocities.

    Args:
        num_layers: Number of blocks.
        num_attention_heads: Number of heads per block.
        attention_head_dim: Channels of a head; a multiple of 4, 32 to 256.
        in_channels: Channels of an image.
        patch_size: Side of a patch in pixels.
        text_dim: Channels of a text embedding; None for a model without text.
        attention: "log-linear" or "dense".
        order: Curve of `foveate.ops.curves.CURVES`. It does not affect dense attention.
        top_k: Number of nodes that each node picks. This and the next options are those of `LogLinearAttention`.
        block_size: Tokens of a block: 16, 32 or 64.
        levels: Number of pooled levels, 1 to 4; None chooses by the number of tokens.
        enrich: Whether to read the means of nodes. An integer n reads only those of levels 1 to n.
        reweight: Whether a mean counts once for each of its tokens.

    Raises:
        ValueError: If an option is out of range.

    Examples:
        >>> model = PixelDiT(num_layers=2, num_attention_heads=2)
        >>> model(torch.randn(1, 3, 24, 40), torch.tensor([500.0])).sample.shape
        torch.Size([1, 3, 24, 40])

    Source: arXiv 2512.16615; DiT, arXiv 2212.09748.
    """

    _supports_gradient_checkpointing = True
    _repeated_blocks = ("PixelBlock",)
    _no_split_modules = ("PixelBlock",)

    @register_to_config
    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        in_channels: int = 3,
        patch_size: int = 1,
        text_dim: int | None = None,
        attention: str = "log-linear",
        order: str = "morton",
        top_k: int = 8,
        block_size: int = 16,
        levels: int | None = None,
        enrich: bool | int = True,
        reweight: bool = True,
    ) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(f"unknown attention {attention!r}: choose {' or '.join(ATTENTIONS)}")
        if order not in CURVES:
            raise ValueError(f"unknown order {order!r}: choose one of {', '.join(CURVES)}")
        if attention_head_dim % 4:
            raise ValueError(f"attention_head_dim={attention_head_dim} does not fit 2D RoPE: use a multiple of 4")
        if patch_size < 1 or num_layers < 1:
            raise ValueError(f"patch_size and num_layers must be 1 or more, not {patch_size} and {num_layers}")
        dim, pixels = num_attention_heads * attention_head_dim, in_channels * patch_size**2
        options: dict[str, Any] = {"top_k": top_k, "block_size": block_size, "levels": levels}
        options |= {"enrich": enrich, "reweight": reweight}
        make = DenseAttention if attention == "dense" else LogLinearAttention
        self.waves = Timesteps(FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time = TimestepEmbedding(FREQUENCIES, dim)
        self.text_in = nn.Linear(text_dim, dim) if text_dim else None
        self.proj_in = nn.Linear(pixels, dim)
        self.blocks = nn.ModuleList(
            PixelBlock(dim, make(dim, num_attention_heads, **options)) for _ in range(num_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(dim, pixels)
        for block in self.blocks:
            block.attn.attend = block.attn.processor = PixelAttnProcessor(block.attn.attend)
            block.attn.inner_dim, block.attn.head_dim = dim, attention_head_dim
        self.gradient_checkpointing = False
        self._init_weights_for_training()

    def _init_weights_for_training(self) -> None:
        """Initialize the weights for training: every block is the identity and the velocity is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for last in (*(block.norm1.linear for block in self.blocks), self.norm_out.linear, self.proj_out):
            nn.init.zeros_(last.weight)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch channels height width"],
        timestep: Float[Tensor, "batch"],
        encoder_hidden_states: Float[Tensor, "batch words text_dim"] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Float[Tensor, "batch channels height width"]]:
        """The predicted velocity, noise minus image.

        Args:
            hidden_states: Noisy images; each side is a multiple of `patch_size`.
            timestep: Noise level of each image, from 0 (image) to 1000 (noise).
            encoder_hidden_states: Text embeddings, if and only if the model has a `text_dim`.
            return_dict: Whether to return a `Transformer2DModelOutput` instead of a tuple.

        Raises:
            ValueError: If patches do not fill the image, or text embeddings are missing or not supported.
        """
        patch, (height, width) = self.config.patch_size, hidden_states.shape[2:]
        if height % patch or width % patch:
            raise ValueError(f"{height} x {width} px is not a multiple of the patch size, {patch} px: change the size")
        if (encoder_hidden_states is None) != (self.text_in is None):
            needs = "needs" if self.text_in is not None else "was made without text_dim and takes no"
            raise ValueError(f"this model {needs} encoder_hidden_states")
        order, back, cos, sin = layout(
            self.config.order, height // patch, width // patch, self.config.attention_head_dim, hidden_states.device
        )
        time = self.time(self.waves(timestep).to(hidden_states.dtype))
        text = None if self.text_in is None else self.text_in(encoder_hidden_states)
        x = self.proj_in(F.pixel_unshuffle(hidden_states, patch).flatten(2).mT[:, order])
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, time, (cos, sin), text)
            else:
                x = block(x, time, (cos, sin), text)
        x = self.proj_out(self.norm_out(x, time))[:, back]
        velocity = F.pixel_shuffle(x.mT.unflatten(2, (height // patch, width // patch)), patch)
        return Transformer2DModelOutput(sample=velocity) if return_dict else (velocity,)


class PixelBlock(nn.Module):
    """Attention and feed-forward, modulated by the noise level."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff = FeedForward(dim, activation_fn="gelu-approximate")

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        time: Float[Tensor, "batch dim"],
        rope: tuple[Float[Tensor, "tokens head_dim"], Float[Tensor, "tokens head_dim"]],
        text: Float[Tensor, "batch words dim"] | None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """The tokens after the block."""
        normed, gate, shift, scale, ff_gate = self.norm1(x, emb=time)
        x = x + gate[:, None] * self.attn(normed, rope=rope, context=text)
        normed = self.norm2(x) * (1 + scale[:, None]) + shift[:, None]
        return x + ff_gate[:, None] * self.ff(normed)


class PixelAttnProcessor:
    """Attention of one layer: the model's default attention, or the plan that `foveate.apply` attaches.

    Args:
        own: Default attention function, called while no plan is attached.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """(output, log-sum-exp, selection), as `foveate.ops.log_linear_attention` returns them."""
        plan: Any = self._parallel_config
        if plan is None:
            return self.own(q, k, v, **options)
        if plan.pattern is None:
            return attend_densely(q, k, v, **options)
        return log_linear_attention(q, k, v, **options, **plan.pattern.options)


class DenseAttention(LogLinearAttention):
    """Dense attention with the weights of `LogLinearAttention`."""

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        self.attend = attend_densely


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, *, extra_k: Tensor | None, extra_v: Tensor | None, **nothing: None
) -> tuple[Tensor, None, None]:
    """Dense attention to all tokens and all extra tokens, with the signature of `LogLinearAttention.attend`."""
    if extra_k is not None and extra_v is not None:
        k, v = torch.cat([k, extra_k], 2), torch.cat([v, extra_v], 2)
    return F.scaled_dot_product_attention(q, k, v), None, None


@torch.compiler.assume_constant_result  # depends only on the size
def layout(
    curve: str, height: int, width: int, head_dim: int, device: torch.device
) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"], Float[Tensor, "tokens dim"], Float[Tensor, "tokens dim"]]:
    """(order, inverse order, cos, sin) of the tokens of a grid; cos and sin are in the new order.

    The first half of a head's channels is rotated by the row of the token's centre, the second half by its column.
    A square image is `SPAN` units high and wide.
    """
    order, step = grid_order(curve, height, width, device=device), SPAN / math.sqrt(height * width)
    by_row, by_column = (
        get_1d_rotary_pos_embed(head_dim // 2, step * (places + 0.5), use_real=True)
        for places in (order // width, order % width)
    )
    cos, sin = (torch.cat(halves, 1) for halves in zip(by_row, by_column, strict=True))
    return order, inverse_order(order), cos, sin
