# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Training of the autoencoder of the built-in model: sharp pictures from smooth latents."""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from foveate.demo.atlas import load_atlas
from foveate.demo.scenes import Scenes, render, scenes
from foveate.training.checkpoints import resume, write_checkpoint
from foveate.training.trained import Trained

__all__ = ["train_vae", "vae_loss"]

SIDES = (64, 96, 128, 192)
KL_WEIGHT = 1e-3
NOISE = 0.1  # relative to the standard deviation of the latents; makes the decoder tolerate errors
CHECKPOINT_EVERY = 1000


def train_vae(
    out: Path,
    vae: AutoencoderKL,
    *,
    steps: int = 6000,
    pixels: int = 128 * 128 * 64,
    rate: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Train an autoencoder in place on renderings of random scenes, and set shift and scale of its latents.

    Args:
        out: Folder of checkpoints; an existing run is resumed.
        vae: Autoencoder with random weights.
        steps: Training steps.
        pixels: Pixels of a batch.
        rate: Highest learning rate.
        seed: Seed of scenes and noise.
        device: Device to train on.
        advance: Called once for each step, including those of earlier runs.
    """
    vae, atlas = vae.to(device).train(), load_atlas().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    parts, settings = {"vae": Trained(vae, [optimizer]), "schedule": schedule}, {"steps": steps, "seed": seed}
    start = resume(out, parts, settings)
    for _ in range(start):
        advance()
    for step in range(start, steps):
        torch.manual_seed(seed * 2**32 + step)
        side = SIDES[step % len(SIDES)]
        batch = list(itertools.islice(scenes(seed * 2**32 + step), max(1, pixels // side**2)))
        pictures = render(atlas, Scenes.of(batch).to(device), side) * 2 - 1
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            loss = vae_loss(vae, pictures)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            write_checkpoint(out, step + 1, parts, settings)
        advance()
    vae.eval()
    _normalise(vae, atlas, seed, device)


def vae_loss(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Reconstruction loss of pictures [batch, 3, side, side] in -1..1, plus terms that keep the latents smooth.

    Down-sampled latents must decode to the down-sampled picture (EQ-VAE, arXiv 2502.09509). This keeps detail from
    being hidden in a code that a small transformer could not learn.
    """
    posterior = vae.encode(pictures).latent_dist
    latents = posterior.sample()
    latents = latents + NOISE * latents.detach().std() * torch.randn_like(latents)
    smaller = F.interpolate(latents, scale_factor=0.5, mode="area")
    loss = KL_WEIGHT * posterior.kl().mean() / latents[0].numel()
    for latent, weight in ((latents, 1.0), (smaller, 0.25)):
        decoded = vae.decode(latent).sample
        wanted = F.interpolate(pictures, decoded.shape[-2:], mode="area")
        loss = loss + weight * (F.l1_loss(decoded, wanted) + F.mse_loss(decoded, wanted))
    return loss


@torch.no_grad()
def _normalise(vae: AutoencoderKL, atlas: Tensor, seed: int, device: str) -> None:
    """Write mean and inverse standard deviation of the latents into the config, as FLUX's autoencoder has them."""
    batch = list(itertools.islice(scenes(seed), 64))
    latents = vae.encode(render(atlas, Scenes.of(batch).to(device), 64) * 2 - 1).latent_dist.mean
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
