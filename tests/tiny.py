"""A tiny Flux with random weights, and inputs for it; a tiny pipeline, and what it is asked to draw."""

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from foveate.demo.untrained import untrained_pipeline
from foveate.integrations.diffusers.pipelines import Request

PROMPTS = ["a cat", "a dog", "an owl", "a car", "a red apple"]
REQUEST = Request("", (64, 64), 2, None, 0)  # 16 x 16 tokens


def pipeline():
    return untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


def flux(layers=2, single_layers=3, dtype=torch.float64, **config):
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        **config,
    )
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
