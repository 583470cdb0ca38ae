"""Tiny models with random weights, and inputs for them; a tiny pipeline, and what it is asked to draw."""

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTTransformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)

from foveate.demo.untrained import untrained_pipeline
from foveate.diffusers.pipelines import Request

PROMPTS = ["a cat", "a dog", "an owl", "a car", "a red apple"]
REQUEST = Request("", (64, 64), 2, None, 0)  # 16 x 16 tokens


def pipeline():
    return untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


def flux(layers=2, single_layers=3, dtype=torch.float64, **config):
    torch.manual_seed(0)
    usual = {"in_channels": 4, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
             "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}  # fmt: skip
    model = FluxTransformer2DModel(num_layers=layers, num_single_layers=single_layers, **usual | config)
    return model.to(dtype).eval()


def ids(*grids, image=lambda i: i):
    """Position ids of the picture and its references: (image number, row, column)."""
    parts = []
    for i, (height, width) in enumerate(grids):
        part = FluxPipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32)
        part[:, 0] = image(i)
        parts.append(part)
    return torch.cat(parts)


def inputs(*grids, text=15, batch=1, dtype=torch.float64, **more):
    """Keyword arguments of one forward; fresh random numbers each time."""
    grids = grids or ((16, 20),)
    tokens = sum(height * width for height, width in grids)
    return {
        "hidden_states": torch.randn(batch, tokens, 4, dtype=dtype),
        "encoder_hidden_states": torch.randn(batch, text, 32, dtype=dtype),
        "pooled_projections": torch.randn(batch, 32, dtype=dtype),
        "timestep": torch.full((batch,), 0.5, dtype=dtype),
        "img_ids": ids(*grids),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
        **more,
    }


def residuals(x, *counts, dim=32):
    """ControlNet residuals for double and single blocks."""
    names = ("controlnet_block_samples", "controlnet_single_block_samples")
    shape = (*x["hidden_states"].shape[:2], dim)
    dtype = x["hidden_states"].dtype
    return {name: [torch.randn(shape, dtype=dtype) for _ in range(n)] for name, n in zip(names, counts, strict=True)}


def unet(dtype=torch.float64, **config):
    """SDXL's layout: two sections with blocks of different resolution, and the middle."""
    torch.manual_seed(0)
    usual = {
        "sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2), "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
    }  # fmt: skip
    return UNet2DConditionModel(**usual | config).to(dtype).eval()


def sd15(dtype=torch.float64, **config):
    """SD 1.5's layout: convolutions around the blocks, one block each, the middle behind a section without any."""
    usual = {
        "block_out_channels": (8, 16, 16), "attention_head_dim": 2, "transformer_layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "use_linear_projection": False, "addition_embed_type": None,
    }  # fmt: skip
    return unet(dtype, **usual | config)


def stable_diffusion():
    """Stable Diffusion 1.5's parts on FLUX's text encoder, in float32."""
    flux = pipeline()
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=flux.text_encoder.config.hidden_size, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = unet, scheduler, None, None
    pipe = StableDiffusionPipeline(vae, flux.text_encoder, flux.tokenizer, *parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unet_inputs(height=16, width=16, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    return {
        "sample": torch.randn(batch, 4, height, width, dtype=dtype),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": torch.randn(batch, 7, 16, dtype=dtype),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(batch, 32, dtype=dtype),
            "time_ids": torch.ones(batch, 6, dtype=dtype),
        },
        "return_dict": False,
    }


def sd3(dtype=torch.float64, **config):
    """With one block of two attentions."""
    torch.manual_seed(0)
    usual = {"sample_size": 32, "patch_size": 1, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
             "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
             "pooled_projection_dim": 64, "out_channels": 4, "pos_embed_max_size": 96, "dual_attention_layers": (0,),
             "qk_norm": "rms_norm"}  # fmt: skip
    return SD3Transformer2DModel(**usual | config).to(dtype).eval()


def sd3_inputs(height=16, width=16, batch=1, dtype=torch.float64, dim=32):
    """Keyword arguments of one forward, with residuals of a ControlNet."""
    return {
        "hidden_states": torch.randn(batch, 4, height, width, dtype=dtype),
        "encoder_hidden_states": torch.randn(batch, 9, 32, dtype=dtype),
        "timestep": torch.full((batch,), 500.0),
        "pooled_projections": torch.randn(batch, 64, dtype=dtype),
        "block_controlnet_hidden_states": [torch.randn(batch, height * width, dim, dtype=dtype)],
        "return_dict": False,
    }


DIT = {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
       "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 8}  # fmt: skip


def pixart(dtype=torch.float64, **config):
    torch.manual_seed(0)
    more = {"use_additional_conditions": False, "cross_attention_dim": 16, "caption_channels": 8}
    return PixArtTransformer2DModel(**DIT | more | config).to(dtype).eval()


def pixart_inputs(height=32, width=32, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward; some of the text is padding."""
    return {
        "hidden_states": torch.randn(batch, 4, height, width, dtype=dtype),
        "timestep": torch.full((batch,), 5.0),
        "encoder_hidden_states": torch.randn(batch, 7, 8, dtype=dtype),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).expand(batch, -1),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def dit(dtype=torch.float64, **config):
    torch.manual_seed(0)
    return DiTTransformer2DModel(**DIT | config).to(dtype).eval()


def dit_inputs(height=32, width=32, batch=1, dtype=torch.float64):
    """Keyword arguments of one forward."""
    return {
        "hidden_states": torch.randn(batch, 4, height, width, dtype=dtype),
        "timestep": torch.full((batch,), 5.0),
        "class_labels": torch.ones(batch, dtype=torch.long),
        "return_dict": False,
    }


def fingerprint(model):
    """Everything that could be left behind on a module."""
    return {
        name: (
            sorted(module.__dict__),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            id(module.__dict__.get("processor", module._modules.get("processor"))),
        )
        for name, module in model.named_modules()
    }
