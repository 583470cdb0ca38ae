"""Training of the recogniser, on random renderings with the defects of generated images."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import save
from torch import Tensor

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.recogniser import GRID, NOTHING, SIDE, Recogniser, cell_centres, load_recogniser, to_side
from foveate.apps.demo.scenes import Scenes, render
from foveate.apps.demo.scenes import scenes as random_scenes
from foveate.utils.files import write_whole
from lab.training.loop import train

__all__ = ["targets", "train_recogniser"]

OPEN = -100  # target of cells that may show an object or the background
NOTHING_WEIGHT = 0.15  # most cells are background
SIDES = (64, 96, 128, 192, 256)  # pixels of the training renderings
RUINED = 1 / 8  # fraction of images distorted beyond recognition, whose target is "nothing"
LEARNING_RATE = 2e-3  # maximum of the schedule


def train_recogniser(
    out: Path,
    *,
    steps: int = 6000,
    batch: int = 256,
    seed: int = 0,
    device: str,
    advance: Callable[[], None] = lambda: None,
) -> Recogniser:
    """Train a recogniser on random renderings, write it to `out`, and return it.

    An interrupted run resumes from its last checkpoint, next to `out`, and ends with the same weights.

    Args:
        out: File of the weights, in half precision.
        steps: Training steps.
        batch: Batch size.
        seed: Seed of initial weights, scenes and images.
        device: Device to train on.
        advance: Called once for each step, including steps of earlier runs.

    Raises:
        ValueError: If the checkpoint belongs to a run with other settings.
    """
    settings = {"steps": steps, "batch": batch, "learning_rate": LEARNING_RATE, "seed": seed}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Recogniser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    atlas = load_atlas().to(device)

    def loss(step: int) -> Tensor:
        pictures, target, objects = _batch(atlas, batch, (seed << 24) + step)
        with torch.autocast(atlas.device.type, torch.bfloat16, enabled=atlas.is_cuda):
            output = model(pictures.contiguous(memory_format=torch.channels_last))
        return _loss(output.logits.float(), target, objects)

    checkpoints = out.with_name(out.stem + "-checkpoints")
    train(checkpoints, model, optimizer, schedule, loss, steps, settings, advance, max_norm=math.inf)
    half = {name: part.half() if part.is_floating_point() else part for name, part in model.state_dict().items()}
    write_whole(out, save(half))
    return load_recogniser(out, device)


def targets(scenes: Scenes) -> Int[Tensor, "batch 16 16"]:
    """Target class of each cell of a scene's image.

    An object if the centre of the cell is in the middle half of its box, "nothing" outside every box, and -100
    (undetermined) in between. Later objects are in front.
    """
    cells = cell_centres(scenes.boxes.device)
    target = torch.full((len(scenes.objects), GRID, GRID), NOTHING, device=cells.device)
    for slot in range(scenes.objects.shape[1]):
        index = scenes.objects[:, slot, None, None]
        x, y, size = scenes.boxes[:, slot, :, None].unbind(1)
        across, down = (cells - x).abs() / size, (cells - y).abs() / size
        distance = torch.maximum(across[:, None, :], down[:, :, None])  # in units of the box side
        target = torch.where((index >= 0) & (distance < 1 / 2), OPEN, target)
        target = torch.where((index >= 0) & (distance < 1 / 4), index, target)
    return target


def _loss(
    logits: Float[Tensor, "batch classes 16 16"],
    target: Int[Tensor, "batch 16 16"],
    objects: Int[Tensor, "batch slots"],
) -> Float[Tensor, ""]:
    """Cross entropy; if the target is undetermined, "nothing" and every object of the image are right."""
    weight = torch.ones(NOTHING + 1, device=logits.device)
    weight[NOTHING] = NOTHING_WEIGHT
    log_chance = logits.log_softmax(1)
    right = F.pad(objects, (0, 1), value=-1) % (NOTHING + 1)  # -1, no object, is the last class
    allowed = torch.zeros_like(log_chance[:, :, 0, 0]).scatter(1, right, 1.0)
    somehow_right = (log_chance + allowed.log()[:, :, None, None]).logsumexp(1)
    open_loss = -somehow_right.where(target == OPEN, 0.0).mean()
    return F.nll_loss(log_chance, target, weight, ignore_index=OPEN) + open_loss


def _batch(
    atlas: Tensor, batch: int, seed: int
) -> tuple[Float[Tensor, "batch 3 128 128"], Int[Tensor, "batch 16 16"], Int[Tensor, "batch slots"]]:
    """Images, targets and objects of a training step, which depend only on the seed."""
    generator = torch.Generator(atlas.device).manual_seed(seed)
    scenes = _scatter(Scenes.of(list(islice(random_scenes(seed), batch))).to(atlas.device), generator)
    ruined = torch.rand(batch, 1, 1, generator=generator, device=generator.device) < RUINED
    pictures = _paint(atlas, scenes, SIDES[seed % len(SIDES)], ruined, generator)
    return pictures, targets(scenes).masked_fill(ruined, NOTHING), scenes.objects


def _scatter(scenes: Scenes, generator: torch.Generator) -> Scenes:
    """Move and resize the objects of half of the scenes at random, and drop overlapping objects."""
    batch, slots = scenes.objects.shape
    draws = torch.rand(batch, slots, 4, generator=generator, device=generator.device)
    size = 0.2 + 0.55 * draws[..., :1].square()
    centre = size / 2 + (1 - size) * draws[..., 1:3]
    apart = (centre[:, :, None] - centre[:, None]).abs().amax(-1) / (size + size.mT)  # 1/2: side by side
    covers = (apart < 0.4).tril(-1).any(-1)
    moved = draws[:, :1, 3] < 0.5
    return scenes._replace(
        objects=scenes.objects.masked_fill(moved & covers, -1),
        boxes=torch.where(moved[..., None], torch.cat([centre, size], -1), scenes.boxes),
    )


def _paint(
    atlas: Tensor, scenes: Scenes, side: int, ruined: Bool[Tensor, "batch 1 1"], generator: torch.Generator
) -> Float[Tensor, "batch 3 128 128"]:
    """Renderings with the defects of generated images: changed backgrounds and colours, distortion, blur and noise."""
    device = generator.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(len(scenes.objects), *shape, generator=generator, device=device)

    colour = torch.where(rand(1) < 0.5, scenes.background, rand(3))
    slope = rand(1, 1) * (rand(3, 2) - 0.5)  # of a gradient, across and down
    place = (torch.arange(side, device=device) + 0.5) / side - 0.5
    x, y = slope[..., :1, None] * place, slope[..., 1:, None] * place[:, None]
    background = (colour[..., None, None] + x + y).clamp(0, 1)
    on_black, on_white = (
        render(atlas, scenes._replace(background=torch.full_like(scenes.background, shade)), side)
        for shade in (0.0, 1.0)
    )
    picture = to_side(on_black + (on_white - on_black) * background)

    distortion = torch.where(ruined, 8 + 8 * rand(1, 1), rand(1, 1)) * 2 / SIDE  # first factor in pixels
    field = torch.randn(len(picture), 2, 12, 12, generator=generator, device=device) * distortion[..., None]
    still = F.affine_grid(torch.eye(2, 3, device=device).expand(len(picture), 2, 3), list(picture.shape), False)
    grid = still + F.interpolate(field, (SIDE, SIDE), mode="bicubic").movedim(1, -1)
    picture = F.grid_sample(picture, grid, padding_mode="border", align_corners=False)

    mixing = torch.eye(3, device=device) * (0.85 + 0.3 * rand(1, 1)) + 0.12 * (rand(3, 3) - 0.5)
    picture = (mixing @ picture.flatten(2) + 0.2 * (rand(3, 1) - 0.5)).unflatten(-1, (SIDE, SIDE))

    pixels, sigma = (
        torch.arange(SIDE, device=device),
        0.3 + torch.where(ruined, 4.0, 1.2) * rand(1, 1).square(),
    )
    blur = (-((pixels[:, None] - pixels) / sigma).square() / 2).softmax(-1)[:, None]
    noise = torch.randn(picture.shape, generator=generator, device=device)
    return (blur @ picture @ blur.mT + 0.1 * rand(1, 1, 1).square() * noise).clamp(0, 1)
