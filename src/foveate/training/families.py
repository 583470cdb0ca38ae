# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Model families for distillation: their text embeddings, latents, layers and velocity."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import FluxPipeline, WanPipeline
from jaxtyping import Float
from torch import Tensor, nn

from foveate.ops.merging import Grid
from foveate.pipelines.request import Request, arguments, makes_video, text_tokens
from foveate.training.pictures import NoisyLatents

__all__ = ["Family", "FluxFamily", "WanFamily", "family_of"]


class Family(ABC):
    """A pipeline that can be distilled.

    Args:
        pipeline: The pipeline.
        request: Size, frames, denoising steps and guidance scale.

    Raises:
        ValueError: If the pipeline has more than one transformer.

    Attributes:
        layers: Names of the layers with a LoRA, for "paper" (as in the HilbertA paper) and "all".
    """

    layers: ClassVar[dict[str, list[str]]]

    def __init__(self, pipeline: Any, request: Request):
        self.pipeline, self.request = pipeline, request

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Grid of image or video tokens: (rows, columns), or (frames, rows, columns)."""

    @abstractmethod
    def embeddings(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Text embeddings [batch, ...] by the pipeline's name for them."""

    def latents(self, requests: Sequence[Request], embeddings: dict[str, Tensor]) -> Tensor:
        """Latents [batch, ...] of images or videos that the pipeline generates.

        Args:
            requests: Requests that differ in prompt and seed only.
            embeddings: Text embeddings of their prompts.
        """
        shared = requests[0]
        asked = {
            "guidance_scale": shared.guidance,
            "num_frames": shared.frames,
            "max_sequence_length": text_tokens(self.pipeline),  # of a negative prompt
        }
        output = self.pipeline(
            **embeddings,
            **{name: value for name, value in asked.items() if value is not None},
            height=shared.size[0],
            width=shared.size[1],
            num_inference_steps=shared.steps,
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
            output_type="latent",
        )
        return output.frames if makes_video(self.pipeline) else output.images

    def encoded(self, pixels: Float[Tensor, "batch 3 height width"]) -> Tensor:
        """Latents [batch, ...] of images from -1 to 1.

        Raises:
            ValueError: If the model makes videos.
        """
        raise ValueError("a video model trains on its own videos: leave the images out")

    @abstractmethod
    def velocity(self, model: nn.Module, batch: NoisyLatents, guidance: float) -> Tensor:
        """Prediction of the transformer, in the shape of the latents.

        Args:
            model: The transformer as the accelerator prepared it.
            batch: Its input.
            guidance: Guidance scale; a model without an input for it ignores it.
        """


class FluxFamily(Family):
    """FLUX.1, text to image."""

    _paper: ClassVar[list[str]] = [
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),  # single blocks have the first three of these
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    ]
    layers: ClassVar = {"paper": _paper, "all": [*_paper, "proj_mlp", "proj_out"]}

    def __init__(self, pipeline: FluxPipeline, request: Request):
        super().__init__(pipeline, request)
        model = pipeline.transformer
        self._ids = pipeline._prepare_latent_image_ids(1, *self.grid, model.device, model.dtype)

    @property
    def grid(self) -> Grid:
        """(rows, columns) of tokens."""
        rows, columns = (side // (2 * self.pipeline.vae_scale_factor) for side in self.request.size)
        return rows, columns

    def embeddings(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Embeddings of T5, and the pooled one of CLIP."""
        limit = text_tokens(self.pipeline)
        text, pooled, _ = self.pipeline.encode_prompt([*prompts], None, max_sequence_length=limit)
        return {"prompt_embeds": text, "pooled_prompt_embeds": pooled}

    def encoded(self, pixels: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch tokens channels"]:
        """Packed latents."""
        vae = self.pipeline.vae
        latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return self.pipeline._pack_latents(latents, *latents.shape)

    def velocity(
        self, model: nn.Module, batch: NoisyLatents, guidance: float
    ) -> Float[Tensor, "batch tokens channels"]:
        """The velocity of packed latents."""
        text, guided = batch.text["prompt_embeds"], self.pipeline.transformer.config.guidance_embeds
        return model(
            hidden_states=batch.latents.to(self._ids.dtype),
            timestep=batch.level,
            guidance=torch.full_like(batch.level, guidance) if guided else None,
            pooled_projections=batch.text["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=self._ids.new_zeros(text.shape[1], 3),
            img_ids=self._ids,
            return_dict=False,
        )[0]


class WanFamily(Family):
    """Wan, text to video, with one transformer."""

    _paper: ClassVar[list[str]] = [
        *(f"attn{number}.{layer}" for number in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ffn.net.0.proj", "ffn.net.2"),
    ]
    layers: ClassVar = {"paper": _paper, "all": [*_paper, "proj_out"]}

    def __init__(self, pipeline: WanPipeline, request: Request):
        super().__init__(pipeline, request)
        if pipeline.transformer_2 is not None:
            raise ValueError(
                "this pipeline has two transformers, one for much noise and one for little: "
                "distil a model with one, such as Wan 2.1"
            )

    @property
    def grid(self) -> Grid:
        """(frames, rows, columns) of tokens."""
        pipe, (height, width) = self.pipeline, self.request.size
        frames, rows, columns = pipe.transformer.config.patch_size
        shown = self.request.frames or arguments(pipe)["num_frames"]
        depth = (shown - 1) // pipe.vae_scale_factor_temporal + 1
        scale = pipe.vae_scale_factor_spatial
        return depth // frames, height // scale // rows, width // scale // columns

    def embeddings(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Embeddings of T5."""
        limit = text_tokens(self.pipeline)
        text, _ = self.pipeline.encode_prompt([*prompts], do_classifier_free_guidance=False, max_sequence_length=limit)
        return {"prompt_embeds": text}

    def velocity(
        self, model: nn.Module, batch: NoisyLatents, guidance: float
    ) -> Float[Tensor, "batch channels frames rows columns"]:
        """The velocity of latents."""
        dtype = self.pipeline.transformer.dtype
        text = batch.text["prompt_embeds"]
        return model(batch.latents.to(dtype), 1000 * batch.level, text.to(dtype), return_dict=False)[0]


FAMILIES: dict[type, type[Family]] = {FluxPipeline: FluxFamily, WanPipeline: WanFamily}


def family_of(pipeline: Any, request: Request) -> Family:
    """The family of a pipeline.

    Raises:
        ValueError: If it cannot be distilled.
    """
    for kind, family in FAMILIES.items():
        if isinstance(pipeline, kind):
            return family(pipeline, request)
    names = " or a ".join(kind.__name__ for kind in FAMILIES)
    raise ValueError(f"distillation needs a {names}, not a {type(pipeline).__name__}: name its base model")
