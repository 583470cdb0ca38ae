# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportPrivateImportUsage=false
"""Models whose processors take no backend: SD3, PixArt, DiT, UNets (SD 1.5, SD 2.1, SDXL), and Cosmos."""

from collections.abc import Iterator
from typing import Any

from diffusers import Transformer2DModel
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    FusedJointAttnProcessor2_0,
    JointAttnProcessor2_0,
    SlicedAttnProcessor,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from foveate.diffusers.backend import LayerPlan, foveate_attention, plan_of
from foveate.diffusers.card import Card, Stack, TokenLayout, text
from foveate.methods.base import DenseFallback, TokenMerging

__all__ = ["CosmosCard", "DiTCard", "DispatchedProcessor", "PixArtCard", "SD3Card", "UNetCard"]


STAND_INS = {
    AttnProcessor: AttnProcessor2_0,
    SlicedAttnProcessor: AttnProcessor2_0,
    FusedJointAttnProcessor2_0: JointAttnProcessor2_0,
}
"""Replacements of processors that lack a form that calls torch's attention, or that need text in every layer."""


class DispatchedProcessor:
    """Runs the wrapped processor; while a `LayerPlan` is attached, Foveate replaces torch's attention in it.

    Args:
        original: The processor to wrap, one of those that call torch's scaled_dot_product_attention.
    """

    known = (
        "AttnProcessor", "SlicedAttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0",
        "JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "CosmosAttnProcessor2_0",
        "AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0", "CogView4AttnProcessor", "HiDreamAttnProcessor",
        "HunyuanAttnProcessor2_0", "FusedHunyuanAttnProcessor2_0", "Lumina2AttnProcessor2_0",
        "QwenImage21AttnProcessor",
    )  # fmt: skip
    _attention_backend = None
    _parallel_config = None

    def __init__(self, original: Any = None) -> None:
        if original is None:  # diffusers makes new processors without arguments when an IP-Adapter comes or goes
            raise ValueError("an IP-Adapter cannot come or go under sparse attention: call foveate.remove(...) first")
        self.original = original
        stand_in = STAND_INS.get(type(original))
        self._calls_torch = stand_in() if stand_in else original

    @classmethod
    def wraps(cls, processor: Any) -> bool:
        """Whether this class can wrap a processor."""
        return type(processor).__name__ in cls.known

    def __call__(
        self, attn: Any, hidden_states: Tensor, *args: Any, image_rotary_emb: Any = None, **kwargs: Any
    ) -> Any:
        """Run the wrapped processor, with arguments as diffusers passes them.

        Raises:
            ValueError: If the processor does not call torch's attention, because something has replaced that.
        """
        if image_rotary_emb is not None:  # diffusers passes on what it finds in the signature
            kwargs["image_rotary_emb"] = image_rotary_emb
        if (plan := plan_of(self)) is None:
            return self.original(attn, hidden_states, *args, **kwargs)
        plan.called = False
        with InPlaceOfTorch(plan):
            out = self._calls_torch(attn, hidden_states, *args, **kwargs)
        if not plan.called:
            raise ValueError(
                f"{type(self.original).__name__} attended without torch's scaled_dot_product_attention: use "
                "the native backend of diffusers, and leave torch's function in its place"
            )
        return out


class InPlaceOfTorch(TorchFunctionMode):
    """Context in which torch's scaled_dot_product_attention follows a plan, in calls of the plan's lengths.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Foveate's attention for [batch, heads, tokens, head_dim], or what `func` returns."""
        if func is scaled_dot_product_attention:
            return self.attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention in place of torch's."""
        self.plan.called = True
        if not self.plan.fits(query.shape[2], key.shape[2]):
            return scaled_dot_product_attention(query, key, value, *args, **kwargs)
        qkv = (x.transpose(1, 2) for x in (query, key, value))
        return foveate_attention(*qkv, *args, **kwargs, _parallel_config=self.plan).transpose(1, 2)


def _skip(attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any, **__: Any) -> Any:
    """What guiders of diffusers that skip an attention module return in its place."""
    return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


AttentionProcessorRegistry.register(DispatchedProcessor, AttentionProcessorMetadata(_skip))


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

    parts = Transformer2DModel, BasicTransformerBlock

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The stacks of each section; those of one section share their merging."""
        sections = [(f"down_blocks.{i}", block) for i, block in enumerate(model.down_blocks)]
        sections += [("mid_block", model.mid_block)] if model.mid_block is not None else []
        sections += [(f"up_blocks.{i}", block) for i, block in enumerate(model.up_blocks)]
        for section, module in sections:
            for i, part in enumerate(getattr(module, "attentions", None) or []):
                if isinstance(part, self.parts[0]) and all(
                    isinstance(block, self.parts[1]) for block in part.transformer_blocks
                ):
                    name = f"{section}.attentions.{i}.transformer_blocks"
                    yield Stack(name, part.transformer_blocks, part, section, 0)


class CosmosCard(Card):
    """`CosmosTransformer3DModel` (Predict, Transfer): video tokens alone, which the model rotates itself."""

    start_percent = 0.4
    timestep_scale = None
    attention = {"attn1": False}  # noqa: RUF012
    rope = "image_rotary_emb"
    rotates_halves = True
    merged_modules = {"attn1": "attn", "attn2": "cross", "ff": "mlp"}  # noqa: RUF012
    wrapper = DispatchedProcessor

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave whole blocks unmerged where each frame has a timestep, or blocks add what a ControlNet returns."""
        if method.granularity == "block" and inputs["timestep"].ndim > 1:
            raise DenseFallback("each frame has its own timestep: merge with granularity='module'")
        if method.granularity == "block" and inputs.get("block_controlnet_hidden_states") is not None:
            raise DenseFallback("blocks add what a ControlNet returns: merge with granularity='module'")

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Text of models with learned positions."""
        return "adds positions to all tokens in each block" if model.config.extra_pos_embed_type else ""
