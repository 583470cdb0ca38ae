# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Training of the autoencoders of the built-in models: sharp images and videos from smooth latents."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.scenes import Scenes, render, scenes
from lab.training.loop import train

__all__ = ["scene_pictures", "train_vae", "vae_loss"]

KL_WEIGHT = 1e-3
NOISE = 0.1  # relative to the standard deviation of the latents; makes the decoder tolerate errors


def scene_pictures(atlas: Tensor, seed: int, pixels: int, side: int) -> Tensor:
    """Renderings of random scenes [batch, 3, side, side] from -1 to 1, with about this many pixels in all."""
    batch = list(itertools.islice(scenes(seed), max(1, pixels // side**2)))
    return render(atlas, Scenes.of(batch).to(atlas.device), side) * 2 - 1


def train_vae(
    out: Path,
    vae: Any,
    *,
    draw: Callable[[Tensor, int, int, Any], Tensor] = scene_pictures,
    steps: int = 6000,
    pixels: int = 128 * 128 * 64,
    sizes: Sequence[Any] = (64, 96, 128, 192),
    rate: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Train an autoencoder in place on random images or videos, and set shift and scale of its latents.

    Args:
        out: Folder of checkpoints; an existing run is resumed.
        vae: Autoencoder with random weights.
        draw: Called with the emoji, a seed, `pixels` and one of `sizes`; returns a batch with values from -1 to 1.
        steps: Training steps.
        pixels: Pixels of a batch, over all frames.
        sizes: Sides of images, or (frames, side) of videos, used in turn.
        rate: Highest learning rate.
        seed: Seed of scenes and noise.
        device: Device to train on.
        advance: Called once for each step, including steps of earlier runs.
    """
    vae, atlas = vae.to(device).train(), load_atlas().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)

    settings = {"steps": steps, "seed": seed, "pixels": pixels, "sizes": repr(sizes)}

    def loss(step: int) -> Tensor:
        torch.manual_seed(seed * 2**32 + step)
        pictures = draw(atlas, seed * 2**32 + step, pixels, sizes[step % len(sizes)])
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            return vae_loss(vae, pictures)

    train(out, vae, optimizer, schedule, loss, steps, settings, advance)
    vae.eval()
    with torch.no_grad():
        _normalise(vae, vae.encode(draw(atlas, seed, pixels, sizes[0])).latent_dist.mean)


def vae_loss(vae: Any, pictures: Tensor) -> Tensor:
    """Reconstruction loss of images or videos from -1 to 1, plus terms that keep the latents smooth.

    Down-sampled latents must decode to the down-sampled image (EQ-VAE, arXiv 2502.09509). This keeps detail from
    being hidden in a code that a small transformer could not learn.

    Args:
        vae: Autoencoder.
        pictures: [batch, 3, side, side] or [batch, 3, frames, side, side].
    """
    posterior = vae.encode(pictures).latent_dist
    latents = posterior.sample()
    latents = latents + NOISE * latents.detach().std() * torch.randn_like(latents)
    *frames, height, width = latents.shape[2:]
    smaller = F.interpolate(latents, (*frames, height // 2, width // 2), mode="area")
    loss = KL_WEIGHT * posterior.kl().mean() / latents[0].numel()
    for latent, weight in ((latents, 1.0), (smaller, 0.25)):
        decoded = vae.decode(latent).sample
        wanted = F.interpolate(pictures, decoded.shape[2:], mode="area")
        loss = loss + weight * (F.l1_loss(decoded, wanted) + F.mse_loss(decoded, wanted))
    return loss


def _normalise(vae: Any, latents: Tensor) -> None:
    """Write mean and standard deviation of latents into the config, in the format of FLUX's and Wan's autoencoders."""
    if latents.ndim == 4:
        vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
        return
    channels = latents.transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=channels.mean(1).tolist(), latents_std=channels.std(1).tolist())
