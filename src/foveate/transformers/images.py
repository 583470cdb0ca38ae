# pyright: basic
"""Images as a language model reads them: placeholders among the token ids, and features in their place."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.transformers.attention import DecoderInputs
from foveate.transformers.fingerprint import checksum, digest
from foveate.transformers.tokens import Tokens

__all__ = ["ImageReader", "PreparedImage", "image_token"]

BEFORE, AFTER = "<<before>>", "<<after>>"


def image_token(config: Any) -> int | None:
    """Token id of the placeholder of an image; None if the model reads none."""
    return getattr(config, "image_token_id", getattr(config, "image_token_index", None))


class PreparedImage(NamedTuple):
    """An image, prepared by a model's processor.

    Attributes:
        tokens: Tokens, with a placeholder for each of the image's features.
        inputs: Arguments of the model.
        checksum: Hash of the arguments.
    """

    tokens: Tokens
    inputs: dict[str, Tensor]
    checksum: str


class ImageReader:
    """Prepares images, and computes the features that take the place of their placeholders.

    Each family's own processor and model do both, so that nothing of them is repeated here.

    Args:
        processor: Processor of the model.
        row_model: Model from `foveate.transformers.attention.row_model`.

    Attributes:
        fingerprint: Hash of how images are prepared.
    """

    def __init__(self, processor: Any, row_model: Any) -> None:
        self._processor, self._model = processor, row_model
        self._placeholder = _placeholder(processor)
        self.fingerprint = digest([processor.image_processor.to_dict(), self._placeholder])

    def prepare(self, image: Any) -> PreparedImage:
        """Prepare an image (PIL)."""
        made = self._processor(text=self._placeholder, images=[image.convert("RGB")], return_tensors="pt",
                               add_special_tokens=False)  # fmt: skip
        inputs = {name: tensor.to(self._model.device) for name, tensor in made.items() if name != "attention_mask"}
        sums = {name: checksum(tensor) for name, tensor in inputs.items()}
        return PreparedImage(Tokens.text(inputs["input_ids"][0]), inputs, digest(sums))

    @torch.no_grad()
    def features(self, image: PreparedImage) -> Tokens:
        """Tokens of an image with their features and positions."""
        try:
            self._model.model(**{
                name: tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor
                for name, tensor in image.inputs.items()
            })  # fmt: skip
        except DecoderInputs as prepared:
            (inputs,) = prepared.args
        ids = image.tokens.ids
        seen = ids == image_token(self._model.config)
        levels = [inputs["inputs_embeds"][0, seen], *(inputs.get("deepstack_visual_embeds") or ())]
        number = torch.where(seen, seen.cumsum(0) - 1, -1)
        positions = inputs.get("position_ids")
        positions = image.tokens.positions if positions is None else positions[-3:, 0]
        return Tokens(ids, positions, number, torch.stack(levels).to(self._model.dtype))


def _placeholder(processor: Any) -> str:
    """What the chat template writes for an image; without a template, the processor's own name of it."""
    if processor.chat_template:
        content = [{"type": "text", "text": BEFORE}, {"type": "image"}, {"type": "text", "text": AFTER}]
        text = processor.apply_chat_template([{"role": "user", "content": content}])
        found = text.partition(BEFORE)[2].partition(AFTER)[0].strip()
        if found:
            return found
    return getattr(processor, "boi_token", None) or processor.image_token
