# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportPrivateImportUsage=false
"""Models whose processors take no backend: SD3, PixArt, DiT, UNets (SD 1.5, SD 2.1, SDXL), and Cosmos."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import Transformer2DModel
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    FusedJointAttnProcessor2_0,
    JointAttnProcessor2_0,
    SlicedAttnProcessor,
)
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from torch import Tensor

from foveate.diffusers.backend import foveate_attention, plan_of
from foveate.diffusers.card import Card, Stack, TokenLayout, text

__all__ = ["CosmosCard", "DiTCard", "DispatchedProcessor", "PixArtCard", "SD3Card", "UNetCard"]


class DispatchedProcessor:
    """Runs the wrapped processor, or Foveate's attention when a `LayerPlan` is attached.

    Args:
        original: The processor to wrap: a plain one, also with fused projections or in slices, a joint one for [image,
            text], or that of Cosmos, which rotates halves of the channels.
    """

    known = (
        AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0, SlicedAttnProcessor,
        JointAttnProcessor2_0, FusedJointAttnProcessor2_0, CosmosAttnProcessor2_0,
    )  # fmt: skip
    _attention_backend = None
    _parallel_config = None

    def __init__(self, original: Any = None) -> None:
        if original is None:  # diffusers makes new processors without arguments when an IP-Adapter comes or goes
            raise ValueError("an IP-Adapter cannot come or go under sparse attention: call foveate.remove(...) first")
        self.original = original

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """What the wrapped processor returns; arguments as diffusers passes them."""
        if plan_of(self) is None:
            rotary = () if image_rotary_emb is None else (image_rotary_emb,)
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, *rotary)
        image = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k, None))
        if encoder_hidden_states is None:
            if image_rotary_emb is not None:
                turns = {"use_real_unbind_dim": -2, "sequence_dim": 1}
                image[:2] = (apply_rotary_emb(x, image_rotary_emb, **turns) for x in image[:2])
            out = foveate_attention(*image, attention_mask, _parallel_config=self._parallel_config).flatten(2)
            return attn.to_out[1](attn.to_out[0](out))
        projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        text = _heads(attn, encoder_hidden_states, projections, (attn.norm_added_q, attn.norm_added_k, None))
        qkv = (torch.cat(both, 1) for both in zip(image, text, strict=True))
        out = foveate_attention(*qkv, _parallel_config=self._parallel_config).flatten(2)
        image_out, text_out = out.tensor_split([hidden_states.shape[1]], 1)
        image_out = attn.to_out[1](attn.to_out[0](image_out))
        return image_out, text_out if attn.context_pre_only else attn.to_add_out(text_out)


def _skip(attn: Attention, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any, **__: Any) -> Any:
    """What guiders of diffusers that skip an attention module return in its place."""
    return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


AttentionProcessorRegistry.register(DispatchedProcessor, AttentionProcessorMetadata(_skip))


def _heads(attn: Attention, x: Tensor, projections: tuple[Any, ...], norms: tuple[Any, ...]) -> list[Tensor]:
    """Queries, keys and values [batch, tokens, heads, head_dim]."""
    qkv = (project(x).unflatten(2, (attn.heads, -1)) for project in projections)
    return [x if norm is None else norm(x).to(x.dtype) for x, norm in zip(qkv, norms, strict=True)]  # for autocast


class DiTCard(Card):
    """`DiTTransformer2DModel`: image tokens only."""

    attention = {"attn1": False}  # noqa: RUF012
    merged_modules = {"attn1": "attn", "attn2": "cross", "ff": "mlp"}  # noqa: RUF012
    wrapper = DispatchedProcessor


class PixArtCard(DiTCard):
    """`PixArtTransformer2DModel`: the text is read by cross-attention, which stays dense."""


class SD3Card(DiTCard):
    """`SD3Transformer2DModel` (SD3, SD3.5): [image, text]; some blocks have a second attention of the image alone."""

    attention = {"attn": True, "attn2": False}  # noqa: RUF012
    merged_modules = {"attn": "attn", "attn2": "attn", "ff": "mlp"}  # noqa: RUF012

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """The image, then the text."""
        picture = super().layout(holder, inputs).segments
        return TokenLayout((*picture, text(inputs["encoder_hidden_states"].shape[1])))


class UNetCard(DiTCard):
    """`UNet2DConditionModel`: a stack of blocks and a grid for each of its `Transformer2DModel` parts."""

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The stacks of each section; those of one section share their merging."""
        sections = [(f"down_blocks.{i}", block) for i, block in enumerate(model.down_blocks)]
        sections += [("mid_block", model.mid_block)] if model.mid_block is not None else []
        sections += [(f"up_blocks.{i}", block) for i, block in enumerate(model.up_blocks)]
        for section, module in sections:
            for i, part in enumerate(getattr(module, "attentions", None) or []):
                if isinstance(part, Transformer2DModel) and all(
                    isinstance(block, BasicTransformerBlock) for block in part.transformer_blocks
                ):
                    name = f"{section}.attentions.{i}.transformer_blocks"
                    yield Stack(name, part.transformer_blocks, part, section, 0)


class CosmosCard(Card):
    """`CosmosTransformer3DModel` (Predict, Transfer): video tokens alone, which the model rotates itself."""

    start_percent = 0.4
    timestep_scale = None
    attention = {"attn1": False}  # noqa: RUF012
    wrapper = DispatchedProcessor
    merging_unsupported_reason = "rotates halves of the channels instead of pairs"
