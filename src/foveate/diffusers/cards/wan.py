"""Wan 2.1 and 2.2 (text or image to video, both experts), VACE and models alike: video tokens alone, text apart."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from foveate.diffusers.card import Card, Stack, TokenLayout, cos_and_sin, earlier_frames
from foveate.methods.base import DenseFallback, TokenMerging

__all__ = ["AnyFlowCard", "HeliosCard", "SkyReelsV2Card", "WanAnimateCard", "WanCard", "WanVACECard"]


class WanCard(Card):
    """`WanTransformer3DModel`, `ChronoEditTransformer3DModel`."""

    blocks = "blocks"
    start_percent = 0.4
    attention = {"attn1": False}  # noqa: RUF012
    rope = "rotary_emb"
    merged_modules = {"attn1": "attn", "attn2": "cross", "ffn": "mlp"}  # noqa: RUF012

    def check_merging(self, method: TokenMerging, inputs: dict[str, Any]) -> None:
        """Leave whole blocks unmerged where each token has a timestep of its own, as in Wan 2.2 TI2V."""
        if inputs["timestep"].ndim == 2 and method.granularity == "block":
            raise DenseFallback("each token has its own timestep: merge with granularity='module'")

    def rotation(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From [1, tokens, 1, head_dim]."""
        cos, sin = rope
        return cos[0, :, 0], sin[0, :, 0]


class SkyReelsV2Card(WanCard):
    """`SkyReelsV2Transformer3DModel`."""

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout | list[TokenLayout]:
        """As in Wan, unless blocks of frames attend to those before."""
        frames: Any = holder.config.num_frame_per_block
        if frames > 1:
            raise DenseFallback("blocks of frames attend causally")
        return super().layout(holder, inputs)


class WanAnimateCard(WanCard):
    """`WanAnimateTransformer3DModel`: the first frame is the reference."""

    def residuals_between_blocks(self, inputs: dict[str, Any]) -> bool:
        """The model adds the face."""
        return True


class AnyFlowCard(WanCard):
    """`AnyFlowTransformer3DModel`, whose latents have frames before channels."""

    def rotation(self, rope: Any) -> tuple[Tensor, Tensor]:
        """From the complex rotations of queries, which are those of keys: [1, 1, tokens, pairs]."""
        return cos_and_sin(rope["query"][0])

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Each frame has a timestep of its own."""
        return "modulates each token by the timestep of its frame"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout | list[TokenLayout]:
        """The video; its grid is that of the latent's patches."""
        return super().layout(holder, {"hidden_states": inputs["hidden_states"].transpose(1, 2)})


class HeliosCard(WanCard):
    """`HeliosTransformer3DModel`: earlier frames at several resolutions attend as text does."""

    attention = {"attn1": True}  # noqa: RUF012
    rope = None
    merging_unsupported_reason = "counts earlier frames from the number of tokens"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> TokenLayout:
        """[earlier frames, video]."""
        names = (f"latents_history_{length}" for length in ("short", "mid", "long"))
        video: Any = super().layout(holder, inputs)
        return TokenLayout((earlier_frames(inputs, *names), *video.segments), packed=True)


class WanVACECard(WanCard):
    """`WanVACETransformer3DModel`: first the blocks of the control, then those of the video, which they add to."""

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Blocks of the control are given two tensors of tokens."""
        return "has blocks of the control that take the video beside it"

    def stacks(self, model: Any) -> Iterator[Stack]:
        """Blocks of the control, then those of the video."""
        blocks = model.vace_blocks
        yield Stack("vace_blocks", blocks, model, None, 0)
        yield from super().stacks(model)
