# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""What `bench step` times: denoisers with random weights, each in a pipeline that tells the step, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn

from foveate.demo.untrained import untrained_pipeline
from foveate.methods import ComposedMethod, HilbertA, Method, ToDo, ToFu, ToMA, ToMeSD

__all__ = ["MODELS", "Model", "random_model"]

NOTHING: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


class Model(NamedTuple):
    """A denoiser to time.

    Attributes:
        build: Its pipeline, made on a device in a dtype.
        step: Keyword arguments of one forward, random numbers: of a denoiser, its image tokens along each side and
            its text tokens.
        text: Text tokens where nobody says.
        methods: What is timed where nobody says.
    """

    build: Callable[[torch.device, torch.dtype], Any]
    step: Callable[[Any, int, int], dict[str, Any]]
    text: int
    methods: tuple[Method | ComposedMethod, ...]


def _built_in(device: torch.device, dtype: torch.dtype) -> FluxPipeline:
    return untrained_pipeline().to(device, dtype)


def _flux_dev(device: torch.device, dtype: torch.dtype) -> FluxPipeline:
    transformer = random_model(lambda: FluxTransformer2DModel(guidance_embeds=True), device, dtype)
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **NOTHING)


def _sdxl(device: torch.device, dtype: torch.dtype) -> StableDiffusionXLPipeline:
    unet = random_model(
        lambda: UNet2DConditionModel(
            sample_size=128,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        ),
        device,
        dtype,
    )
    return StableDiffusionXLPipeline(scheduler=EulerDiscreteScheduler(), unet=unet, add_watermarker=False, **NOTHING)


def random_model(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> Any:
    """The model, its weights made in their dtype and where they are to be."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make().eval()
    finally:
        torch.set_default_dtype(default)


def _flux_step(transformer: FluxTransformer2DModel, side: int, text: int) -> dict[str, Any]:
    config: Any = transformer.config
    like: dict[str, Any] = {"device": transformer.device, "dtype": transformer.dtype}
    return {
        "hidden_states": torch.randn(1, side * side, config.in_channels, **like),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim, **like),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **like),
        "timestep": torch.full((1,), 0.5, **like),
        "guidance": torch.full((1,), 3.5, **like) if config.guidance_embeds else None,
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, side, side, **like),
        "txt_ids": torch.zeros(text, 3, **like),
        "return_dict": False,
    }


def _sdxl_step(unet: UNet2DConditionModel, side: int, text: int) -> dict[str, Any]:
    """Of the two samples that guidance makes of a picture. `side` is of the largest maps with attention."""
    config: Any = unet.config
    like: dict[str, Any] = {"device": unet.device, "dtype": unet.dtype}
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": torch.randn(2, config.in_channels, 2 * side, 2 * side, **like),
        "timestep": torch.tensor(500.0, device=unet.device),
        "encoder_hidden_states": torch.randn(2, text, config.cross_attention_dim, **like),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, pooled, **like),
            "time_ids": torch.zeros(2, 6, **like),
        },
        "return_dict": False,
    }


FLUX = (
    *(HilbertA(tiles=1), HilbertA(tiles=4), HilbertA(tiles=16)),
    *(ToMA(keep=0.5), ToMA(keep=0.25), ComposedMethod((HilbertA(tiles=16), ToMA(keep=0.5)))),
)
SDXL = *(ToMA(keep=keep) for keep in (0.75, 0.5, 0.25)), ToMeSD(keep=0.5), ToFu(keep=0.5), ToDo()

MODELS = {
    "built-in": Model(_built_in, _flux_step, 512, FLUX),
    "flux-dev": Model(_flux_dev, _flux_step, 512, FLUX),
    "sdxl": Model(_sdxl, _sdxl_step, 77, SDXL),
}
"""By name: the built-in model's size (17 M parameters), FLUX.1-dev's (12 B), SDXL's (2.6 B)."""
