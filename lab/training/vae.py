# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""How the built-in model's autoencoder was made: sharp pictures from smooth latents."""

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

__all__ = ["train_vae", "vae_loss"]

SIDES = (64, 96, 128, 192)
KL_WEIGHT = 1e-3
NOISE = 0.1  # of the latents' spread: the decoder forgives what the transformer will get wrong
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
    """Train `vae` in place on renderings of random scenes; shift and scale of its latents go into its config.

    Args:
        out: Folder of checkpoints; what lies there is gone on with.
        vae: Straight from its config.
        steps: Of training.
        pixels: In one step's pictures together.
        rate: Highest learning rate.
        seed: Of scenes and noise.
        device: Where to train.
        advance: Called once for each step, also for those of a run that was broken off.
    """
    vae, atlas = vae.to(device).train(), load_atlas().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    parts, settings = {"vae": vae, "optimizer": optimizer, "schedule": schedule}, {"steps": steps, "seed": seed}
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
    """Difference of pictures [batch, 3, side, side] in -1..1 and their reconstruction, plus what keeps latents smooth.

    A latent made smaller must decode to the picture made smaller (EQ-VAE, arXiv 2502.09509): that forbids latents that
    hide detail in a code of their own, which a small transformer would not learn.
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
    """Write the mean and the inverse spread of latents into the config, as FLUX's autoencoder has them."""
    batch = list(itertools.islice(scenes(seed), 64))
    latents = vae.encode(render(atlas, Scenes.of(batch).to(device), 64) * 2 - 1).latent_dist.mean
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
