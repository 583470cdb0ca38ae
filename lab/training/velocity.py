# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Flow matching loss of the built-in model, and the trained modules."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from torch import Tensor, nn

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.scenes import render
from foveate.training.pictures import noise_shift
from foveate.training.trained import muon_and_adamw
from lab.training.stages import Batch

__all__ = ["Latents", "VelocityModel", "flow_loss", "initialise", "noise_levels"]


def initialise(transformer: nn.Module, zero: Callable[[str], bool]) -> None:
    """Initialise linear layers in place, with zero biases, and zero weights in layers whose names satisfy `zero`."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight) if zero(name) else nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class VelocityModel(nn.Module):
    """Trained parts of a pipeline as one module, from token ids and noisy latents to velocities."""

    def __init__(self, pipeline: FluxPipeline):
        super().__init__()
        self.transformer, self.clip, self.t5 = pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2
        # torch 2.11, H200: the fused backward of a learned bias, and cuDNN's for these shapes, read invalid memory
        self.t5.set_attn_implementation("eager")

    def forward(self, noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity of packed latents [batch, tokens, channels] at noise levels [batch]."""
        side = math.isqrt(noisy.shape[1])
        return self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids).last_hidden_state,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, noisy.device, torch.float32),
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device),
            return_dict=False,
        )[0]

    def parts(self) -> dict[str, nn.Module]:
        """Modules by their names in the pipeline."""
        return {"transformer": self.transformer, "text_encoder": self.clip, "text_encoder_2": self.t5}

    def initialise(self) -> None:
        """Initialise the weights: every block starts as the identity, the velocity as zero."""
        ends = "proj_out", "norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"
        initialise(self.transformer, lambda name: name.endswith(ends))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside blocks, AdamW for everything else."""

        def inside(name: str) -> bool:
            block = any(words in name for words in ("transformer_blocks.", ".layers.", ".block."))
            return block and not name.endswith("relative_attention_bias.weight")

        return muon_and_adamw(self.named_parameters(), inside, rate=1e-3, weight_decay=0.01)


class Latents:
    """Latents of scenes, and the shift of their noise levels."""

    def __init__(self, pipeline: FluxPipeline, device: torch.device):
        self.vae, self.scheduler, self.atlas = pipeline.vae.to(device), pipeline.scheduler, load_atlas().to(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Packed latents [batch, tokens, channels]."""
        pictures = render(self.atlas, batch.scenes, batch.side) * 2 - 1
        latents = torch.cat([self.vae.encode(part).latent_dist.mean for part in pictures.split(64)])
        latents = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        return FluxPipeline._pack_latents(latents, *latents.shape)

    def shift(self, latents: Tensor) -> float:
        """Shift of the logit of the noise levels, by the size of the latents."""
        return noise_shift(self.scheduler, latents.shape[1])


def noise_levels(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Random noise levels, shifted like the scheduler's."""
    levels = torch.randn(count, device=generator.device, generator=generator)
    return torch.sigmoid(levels + shift)


def flow_loss(model: nn.Module, latents_of: Any, batch: Any, generator: torch.Generator) -> Tensor:
    """Mean squared error of the velocity on a batch at random noise levels."""
    latents = latents_of(batch)
    sigma = noise_levels(len(latents), latents_of.shift(latents), generator)
    noise = torch.randn(latents.shape, device=latents.device, generator=generator)
    level = sigma.view(-1, *[1] * (latents.ndim - 1))
    velocity = model((1 - level) * latents + level * noise, sigma, *batch.text)
    return F.mse_loss(velocity.float(), noise - latents)
