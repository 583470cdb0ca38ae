"""Krea 2: [text, image] in one stream, positions of both in `position_ids`."""

from collections.abc import Iterator
from typing import Any

from foveate.diffusers.card import Card, Stack, TokenLayout, image, text_and_padding
from foveate.diffusers.cards.flux import grids_of

__all__ = ["Krea2Card"]


class Krea2Card(Card):
    """`Krea2Transformer2DModel`. Its text is padded in the middle: the end of the prompt template comes last."""

    rope = "image_rotary_emb"
    timestep_scale = 1.0
    padding_mask = "encoder_attention_mask"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[text, padding, text, image]."""
        tokens = inputs["encoder_hidden_states"].shape[1]
        images = [image(*grid) for grid in grids_of(inputs["position_ids"], tokens)]
        texts = text_and_padding(tokens, inputs.get("encoder_attention_mask"))
        return [TokenLayout((*words, *images)) for words in texts]

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks, which are given text and image in one tensor."""
        (stack,) = super().stacks(model)
        yield stack._replace(joined=True)
