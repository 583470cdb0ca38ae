"""HunyuanVideo and HunyuanVideo 1.5, text or image to video: [video, text, padding]; FramePack."""

from typing import Any

from foveate.diffusers.card import (
    Card,
    Segments,
    TokenLayout,
    earlier_frames,
    padding,
    patches,
    text,
    text_and_padding,
)
from foveate.diffusers.cards.hunyuan_image import HunyuanImageCard, padding_last

__all__ = ["FramepackCard", "HunyuanVideo15Card", "HunyuanVideoCard"]


class HunyuanVideoCard(HunyuanImageCard):
    """`HunyuanVideoTransformer3DModel`: double-stream and single-stream blocks as in FLUX."""

    start_percent = 0.4
    rope = "freqs_cis", "image_rotary_emb"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[video, text, padding]; the grid is that of the latent's patches."""
        patch = holder.config.patch_size_t, holder.config.patch_size, holder.config.patch_size
        grid = patches(inputs["hidden_states"].shape[2:], patch)
        return [TokenLayout((grid, *words)) for words in self.text(inputs)]

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The text; the model counts its tokens and takes the last ones for padding."""
        return padding_last(
            text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs["encoder_attention_mask"])
        )

    def block_merging_unsupported_reason(self, model: Any) -> str:
        """Text of models that start from a frame."""
        replaces_tokens = model.config.get("image_condition_type") == "token_replace"
        return "modulates the first frame in its own way" if replaces_tokens else ""


class HunyuanVideo15Card(HunyuanVideoCard):
    """`HunyuanVideo15Transformer3DModel`: double-stream blocks. Its text is an image and two prompts."""

    stacks = Card.stacks

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The image, which is padding if it is all zero, and the prompts; the model puts all padding last."""
        image = inputs["image_embeds"]
        first, second = (
            text_and_padding(inputs[f"encoder_hidden_states{i}"].shape[1], inputs[f"encoder_attention_mask{i}"])
            for i in ("", "_2")
        )
        shown = (text if image.any() else padding)(image.shape[1])
        return padding_last(len(image) * ((shown,),), first, second)


class FramepackCard(HunyuanVideoCard):
    """`HunyuanVideoFramepackTransformer3DModel`: earlier frames at several resolutions attend as text does."""

    merging_unsupported_reason = "puts earlier frames before the video"

    def layout(self, holder: Any, inputs: dict[str, Any]) -> list[TokenLayout]:
        """[earlier frames, video, text, padding]."""
        earlier = earlier_frames(inputs, "latents_clean", "latents_history_2x", "latents_history_4x")
        return [TokenLayout((earlier, *layout.segments)) for layout in super().layout(holder, inputs)]

    def text(self, inputs: dict[str, Any]) -> tuple[Segments, ...]:
        """The image and the prompt; the model cuts the padding off if the batch is a single sample."""
        words = text_and_padding(inputs["encoder_hidden_states"].shape[1], inputs["encoder_attention_mask"])
        texts = padding_last(len(words) * ((text(inputs["image_embeds"].shape[1]),),), words)
        return texts if len(texts) > 1 else tuple(words[:1] for words in texts)
