"""HunyuanImage 2.1: [image, text], with double-stream and single-stream blocks as in FLUX."""

from itertools import chain
from typing import Any

from foveate.diffusers.card import Segment, Segments, TokenLayout, padding, patches, text, text_and_padding
from foveate.diffusers.cards.flux import FluxCard
from foveate.methods.base import DenseFallback

__all__ = ["HunyuanImageCard", "padding_last"]


class HunyuanImageCard(FluxCard):
    """`HunyuanImageTransformer2DModel`. Text tokens are not rotated."""

    timestep_scale = 1000.0
    padding_mask = "encoder_attention_mask"
    rotates_text = False
    returns_image_first = True

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[image, text, padding]."""
        sides = inputs["hidden_states"].shape[2:]
        if len(sides) > 2:
            raise DenseFallback("latents with frames are no images")
        picture = patches(sides, holder.config.patch_size)
        return [TokenLayout((picture, *words)) for words in self.text(inputs)]

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The text; the model puts the tokens of both prompts first and their padding last."""
        texts = text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs["encoder_attention_mask"])
        if (more := inputs.get("encoder_hidden_states_2")) is None:
            return texts
        return padding_last(texts, text_and_padding(more.shape[1], inputs["encoder_attention_mask_2"]))


def padding_last(*texts: tuple[Segments, ...]) -> tuple[Segments, ...]:
    """All tokens of several texts, then all their padding, in each sample."""

    def joined(segments: list[Segment]) -> Segments:
        real = sum(segment.tokens for segment in segments if segment.kind == "text")
        return text(real), padding(sum(segment.tokens for segment in segments) - real)

    return tuple(joined([*chain(*words)]) for words in zip(*texts, strict=True))
