# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false
"""Models whose processors take no backend: SD3, PixArt, DiT, UNets (SD 1.5, SD 2.1, SDXL), and Cosmos."""

from collections.abc import Iterator
from typing import Any

from diffusers import Transformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from torch import nn

from foveate.diffusers.card import Card, Layout, Stack, text
from foveate.diffusers.processors import DispatchedProcessor

__all__ = ["CosmosCard", "DiTCard", "PixArtCard", "SD3Card", "UNetCard"]


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

    def layout(self, holder: nn.Module, inputs: dict[str, Any]) -> Layout:
        """The image, then the text."""
        picture = super().layout(holder, inputs).segments
        return Layout((*picture, text(inputs["encoder_hidden_states"].shape[1])))


class UNetCard(DiTCard):
    """`UNet2DConditionModel`: a stack of blocks and a grid for each of its `Transformer2DModel` parts."""

    def stacks(self, model: nn.Module) -> Iterator[Stack]:
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
    attention = {"attn1": False}  # noqa: RUF012
    wrapper = DispatchedProcessor
    unmerged = "rotates halves of the channels instead of pairs"
