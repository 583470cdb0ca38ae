# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""The pipeline of a `PixelDiT`: noise in, Euler steps, images out."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float
from torch import Tensor

from foveate.methods import LLSA
from foveate.nn.pixel_dit import PixelDiT

__all__ = ["PixelPipeline", "as_method", "noise_scale"]


def noise_scale(height: int, width: int) -> float:
    """Scale of the noise for an image size: 1 up to 64 x 64, and n / 64 for n x n.

    Neighbouring pixels of a large image are redundant, so it takes more noise to hide it.

    Source: arXiv 2512.16615, noise rescaling.
    """
    return max(1.0, math.sqrt(height * width) / 64)


class PixelPipeline(DiffusionPipeline):
    """Pipeline that generates images with a `PixelDiT`, from captions or unconditionally.

    Args:
        transformer: Predicts the velocity.
        scheduler: Scheduler of the Euler steps, a `FlowMatchEulerDiscreteScheduler`.
        tokenizer: Tokenizer of the captions; None for a model without captions.
        text_encoder: Text encoder, whose output has a `last_hidden_state`; None for a model without captions.
        height: Default height in pixels, as in the last training stage.
        width: Default width in pixels.
        guidance_scale: Default guidance scale.

    Examples:
        >>> pipe = PixelPipeline.from_pretrained("trained")
        >>> pipe("a cat", num_inference_steps=20).images[0]
    """

    model_cpu_offload_seq = "text_encoder->transformer"
    _optional_components = ["tokenizer", "text_encoder"]  # noqa: RUF012

    def __init__(
        self,
        transformer: PixelDiT,
        scheduler: FlowMatchEulerDiscreteScheduler,
        tokenizer: Any = None,
        text_encoder: Any = None,
        height: int = 64,
        width: int = 64,
        guidance_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, scheduler=scheduler, tokenizer=tokenizer, text_encoder=text_encoder
        )
        self.register_to_config(height=height, width=width, guidance_scale=guidance_scale)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] = "",
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 20,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images.

        Args:
            prompt: One caption for each image; "" for a model without captions.
            height: Height in pixels.
            width: Width in pixels.
            num_inference_steps: Number of Euler steps, of equal length.
            guidance_scale: Scale of classifier-free guidance; 1 is none and takes half the time.
            generator: Generator of the noise, or one for each image.
            output_type: "pil", "np" or "pt".
            return_dict: Return an object with `images` instead of a tuple.
            callback_on_step_end: Called after every step with pipeline, step, timestep and an empty dict.

        Raises:
            ValueError: If there is a caption or guidance for a model without captions.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        guidance_scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        if self.text_encoder is None and (any(prompts) or guidance_scale != 1):
            raise ValueError('this model was trained without captions: use prompt "" and no guidance scale')
        height, width = height or self.config.height, width or self.config.width
        device, channels = self._execution_device, self.transformer.config.in_channels
        text = self.encode(prompts)
        blank = self.encode(len(prompts) * [""]) if guidance_scale != 1 else None
        x = randn_tensor((len(prompts), channels, height, width), generator, device, torch.float32)
        x = x * noise_scale(height, width)
        self.scheduler.set_timesteps(
            sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps), device=device
        )
        for step, time in enumerate(self.progress_bar(self.scheduler.timesteps)):
            velocity = self._velocity(x, time, text)
            if blank is not None:
                without = self._velocity(x, time, blank)
                velocity = without + guidance_scale * (velocity - without)
            x = self.scheduler.step(velocity, time, x, return_dict=False)[0]
            if callback_on_step_end:
                callback_on_step_end(self, step, time, {})
        pictures = VaeImageProcessor(vae_scale_factor=1).postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=pictures) if return_dict else (pictures,)

    def encode(self, prompts: list[str]) -> Float[Tensor, "batch words text_dim"] | None:
        """Embeddings of the words of captions, padded to the tokenizer's length; None without a text encoder."""
        if self.text_encoder is None:
            return None
        padded = {"padding": "max_length", "max_length": self.tokenizer.model_max_length, "truncation": True}
        ids = self.tokenizer(prompts, **padded, return_tensors="pt").input_ids
        return self.text_encoder(ids.to(self._execution_device)).last_hidden_state

    def _velocity(self, x: Tensor, time: Tensor, text: Tensor | None) -> Float[Tensor, "batch channels height width"]:
        dtype = self.transformer.dtype
        return self.transformer(x.to(dtype), time.expand(len(x)), text, return_dict=False)[0].float()


def as_method(pipeline: PixelPipeline) -> LLSA:
    """The log-linear attention of a pipeline's model as a method. The model itself becomes dense."""
    model = pipeline.transformer
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    dense = PixelDiT(**{**config, "attention": "dense"}).to(model.device, model.dtype)
    dense.load_state_dict(model.state_dict())
    pipeline.register_modules(transformer=dense.eval())
    options = {name: config[name] for name in ("top_k", "block_size", "levels", "enrich", "reweight")}
    return LLSA(**options, curve=config["order"], min_tokens=0)
