"""A small network that says which emoji stand where: the yardstick of the pictures that a model generates.

It learns from renderings of training scenes alone and never sees a generated picture.
"""

import io
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from foveate.demo.atlas import DATA, NAMES, load_atlas
from foveate.demo.scenes import Scene, Scenes, render
from foveate.demo.scenes import scenes as random_scenes
from foveate.files import write_whole

__all__ = [
    "WEIGHTS",
    "Detection",
    "Recogniser",
    "Seen",
    "Verdict",
    "accuracy",
    "detect",
    "frechet_distance",
    "judge",
    "load_recogniser",
    "recognise",
    "targets",
    "train_recogniser",
]

WEIGHTS = DATA / "recogniser.safetensors"
SIDE, GRID, DIM = 128, 16, 128  # pixels, cells and channels that the network works with
NOTHING, IGNORED = len(NAMES), -100
THRESHOLD = 0.5  # probability from which on an object counts as found
NOTHING_WEIGHT = 0.15  # most cells are background
SIDES = (64, 96, 128, 192, 256)  # of the renderings it learns from
RUINED = 1 / 8  # of them show mush in the right colours, which is nothing
CHECKPOINT_STEPS = 1000


class Seen(NamedTuple):
    """What the network makes of pictures: the classes of each cell (the last is "nothing"), and pooled features."""

    logits: Float[Tensor, "batch classes 16 16"]
    features: Float[Tensor, "batch dim"]


class Detection(NamedTuple):
    """An object (an index into `NAMES`), its centre as fractions of the picture's side, its highest probability."""

    object: int
    x: float
    y: float
    confidence: float


class Verdict(NamedTuple):
    """How much of a scene a picture shows, in counts, so that verdicts can be added up."""

    objects_found: int
    objects: int
    relations_held: int
    relations: int

    @property
    def all_right(self) -> bool:
        """Whether every object was found and every relation holds; what else was found does not count."""
        return (self.objects_found, self.relations_held) == (self.objects, self.relations)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, stride: int = 1, dilation: int = 1):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, dilation, dilation, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.skip(x))


class Recogniser(nn.Module):
    """Which emoji, if any, has its middle in each of 16 x 16 cells; 1.2 M parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            _Residual(32, 64, stride=2),
            _Residual(64, DIM, stride=2),
            # a cell sees 29 cells around it, more than the picture has
            *(_Residual(DIM, DIM, dilation=dilation) for dilation in (1, 2, 4)),
        )
        self.head = nn.Conv2d(DIM, NOTHING + 1, 1)

    def forward(self, pictures: Float[Tensor, "batch 3 side side"]) -> Seen:
        """What is seen in pictures of any side, from 0 to 1."""
        features = self.body(4 * _resize(pictures) - 2)
        return Seen(self.head(features), features.mean((2, 3)))


def targets(scenes: Scenes) -> Int[Tensor, "batch 16 16"]:
    """What the network should say of each cell of a scene's picture.

    An object where the cell's centre lies in the middle half of its box, the last class outside every box, and
    -100, which the loss ignores, in between. Later objects stand in front.
    """
    cells = _cells(scenes.boxes.device)
    target = torch.full((len(scenes.objects), GRID, GRID), NOTHING, device=cells.device)
    for slot in range(scenes.objects.shape[1]):
        index = scenes.objects[:, slot, None, None]
        x, y, size = scenes.boxes[:, slot, :, None].unbind(1)
        across, down = (cells - x).abs() / size, (cells - y).abs() / size
        distance = torch.maximum(across[:, None, :], down[:, :, None])  # in sides of the box
        target = torch.where((index >= 0) & (distance < 1 / 2), IGNORED, target)
        target = torch.where((index >= 0) & (distance < 1 / 4), index, target)
    return target


def detect(seen: Seen) -> list[list[Detection]]:
    """The objects found in each picture, each once: its centre is the mean of the cells where it is most probable."""
    chance = seen.logits.detach().float().softmax(1)
    won = chance * (chance == chance.amax(1, keepdim=True))  # a cell belongs to one class
    won, cells = won[:, :NOTHING].cpu(), _cells("cpu")
    peak, mass = won.amax((2, 3)), won.sum((2, 3))
    x, y = won.sum(2) @ cells / mass, won.sum(3) @ cells / mass
    return [
        [
            Detection(index, float(x[row, index]), float(y[row, index]), float(peak[row, index]))
            for index in (peak[row] > THRESHOLD).nonzero().flatten().tolist()
        ]
        for row in range(len(won))
    ]


def judge(detections: Sequence[Detection], scene: Scene) -> Verdict:
    """How much of a scene was found.

    A relation holds if both its objects were found and stand so: "above" allows twice as much aside as down, "left
    of" twice as much up or down as aside, "beside" less up or down than aside. A scene without relations has 0 of 0.
    """
    found = {detection.object: detection for detection in detections}
    spots = [found.get(index) for index in scene.objects]
    held = sum(_holds(relation.kind, spots[relation.first], spots[relation.second]) for relation in scene.relations)
    return Verdict(len(spots) - spots.count(None), len(spots), held, len(scene.relations))


def _holds(kind: str, first: Detection | None, second: Detection | None) -> bool:
    if first is None or second is None:
        return False
    right, down = second.x - first.x, second.y - first.y
    return {"above": down > abs(right) / 2, "left of": right > abs(down) / 2, "beside": abs(right) > abs(down)}[kind]


@torch.no_grad()
def recognise(
    model: Recogniser,
    pictures: Float[Tensor, "number 3 side side"] | UInt8[Tensor, "number 3 side side"],
    batch: int = 64,
) -> tuple[list[list[Detection]], Float[Tensor, "number dim"]]:
    """The objects found in each picture, and the pictures' features, on the model's device.

    Args:
        model: In eval mode, as `load_recogniser` gives it.
        pictures: From 0 to 1 or, as bytes, to 255; on any device.
        batch: Pictures at a time.
    """
    device, scale = next(model.parameters()).device, 1.0 if pictures.is_floating_point() else 255.0
    detections: list[list[Detection]] = []
    features: list[Tensor] = []
    for part in pictures.split(batch):
        seen = model(part.to(device, torch.float32) / scale)
        detections += detect(seen)
        features.append(seen.features)
    return detections, torch.cat(features)


def accuracy(model: Recogniser, *, scenes: int, seed: int, side: int = SIDE) -> tuple[float, float]:
    """On renderings of evaluation scenes: the fraction of objects found, and of scenes that are all right.

    Args:
        model: In eval mode.
        scenes: How many.
        seed: The same seed gives the same scenes.
        side: Of the renderings, in pixels.
    """
    atlas = load_atlas().to(next(model.parameters()).device)
    some = list(islice(random_scenes(seed, evaluation=True), scenes))
    verdicts: list[Verdict] = []
    for start in range(0, scenes, 64):
        part = some[start : start + 64]
        found, _ = recognise(model, render(atlas, Scenes.of(part).to(atlas.device), side))
        verdicts += map(judge, found, part)
    found_in_all, in_all = (sum(counts) for counts in list(zip(*verdicts, strict=True))[:2])
    return found_in_all / in_all, sum(verdict.all_right for verdict in verdicts) / scenes


def frechet_distance(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"]) -> float:
    """How far two sets of features lie apart, each taken for a Gaussian; 0 for the same mean and covariance.

    |mean a - mean b|² + tr(A + B - 2 (A^½ B A^½)^½) with their covariances A and B (Heusel et al. 2017, "FID"), in
    float64. It is biased upwards for few samples: compare only numbers of the same n and m.
    """
    a, b = a.double(), b.double()
    first, second = torch.cov(a.mT), torch.cov(b.mT)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * shared)


def load_recogniser(path: Path = WEIGHTS, device: torch.device | str = "cpu") -> Recogniser:
    """The trained recogniser in eval mode and float32.

    Raises:
        ValueError: if the file is missing or damaged.
    """
    with torch.device("meta"):
        model = Recogniser()
    try:
        model.load_state_dict(load_file(path), assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        state = "is damaged" if path.exists() else "is missing"
        raise ValueError(
            f"the recogniser's file {path} {state}: make it with `foveate demo train --part recogniser`"
        ) from error
    return model.to(device, torch.float32).eval()


def train_recogniser(
    out: Path,
    *,
    steps: int = 6000,
    batch: int = 256,
    learning_rate: float = 2e-3,
    seed: int = 0,
    device: str,
    advance: Callable[[], None] = lambda: None,
) -> Recogniser:
    """A recogniser trained on random renderings, as `load_recogniser` gives it from `out`, where it is written.

    A run that was cut off goes on from its last checkpoint, a file beside `out`, and ends as it would have ended.

    Args:
        out: Where the weights go, in half precision.
        steps: Batches to learn from.
        batch: Pictures in a batch.
        learning_rate: At its highest.
        seed: The same seed gives the same first weights, scenes and pictures.
        device: Where to train.
        advance: Called once for each step, also for those of a run that was cut off.

    Raises:
        ValueError: if the checkpoint is of a run with other settings.
    """
    settings = {"steps": steps, "batch": batch, "learning_rate": learning_rate, "seed": seed}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Recogniser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = out.with_name(out.name + ".checkpoint")
    done = _go_on(checkpoint, parts, settings, device) if checkpoint.exists() else 0
    for _ in range(done):
        advance()
    atlas = load_atlas().to(device)
    for step in range(done, steps):
        pictures, target, objects = _lesson(atlas, batch, (seed << 24) + step)
        with torch.autocast(atlas.device.type, torch.bfloat16, enabled=atlas.is_cuda):
            seen = model(pictures.contiguous(memory_format=torch.channels_last))
        loss = _loss(seen.logits.float(), target, objects)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"settings": settings, "done": step + 1, **states}, file := io.BytesIO())
            write_whole(checkpoint, file.getvalue())
        advance()
    half = {name: part.half() if part.is_floating_point() else part for name, part in model.state_dict().items()}
    write_whole(out, save(half))
    checkpoint.unlink(missing_ok=True)
    return load_recogniser(out, device)


def _go_on(checkpoint: Path, parts: dict[str, Any], settings: dict[str, Any], device: str) -> int:
    """Bring all parts to where the checkpoint left them: after how many steps."""
    saved = torch.load(checkpoint, map_location=device, weights_only=True)
    if saved["settings"] != settings:
        raise ValueError(f"{checkpoint} is of a run with {saved['settings']}, not with {settings}: delete it")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["done"]


def _loss(
    logits: Float[Tensor, "batch classes 16 16"],
    target: Int[Tensor, "batch 16 16"],
    objects: Int[Tensor, "batch slots"],
) -> Float[Tensor, ""]:
    """Cross entropy; where the target is open, "nothing" and every object of the picture are equally right."""
    weight = torch.ones(NOTHING + 1, device=logits.device)
    weight[NOTHING] = NOTHING_WEIGHT
    log_chance = logits.log_softmax(1)
    right = F.pad(objects, (0, 1), value=-1) % (NOTHING + 1)  # -1, no object, is the last class
    allowed = torch.zeros_like(log_chance[:, :, 0, 0]).scatter(1, right, 1.0)
    somehow_right = (log_chance + allowed.log()[:, :, None, None]).logsumexp(1)
    return F.nll_loss(log_chance, target, weight, ignore_index=IGNORED) - (
        somehow_right.where(target == IGNORED, 0.0).mean()
    )


def _lesson(
    atlas: Tensor, batch: int, moment: int
) -> tuple[Float[Tensor, "batch 3 128 128"], Int[Tensor, "batch 16 16"], Int[Tensor, "batch slots"]]:
    """Pictures, targets and objects of one step, the same whenever that step is taken."""
    chance = torch.Generator(atlas.device).manual_seed(moment)
    scenes = _scatter(Scenes.of(list(islice(random_scenes(moment), batch))).to(atlas.device), chance)
    ruined = torch.rand(batch, 1, 1, generator=chance, device=chance.device) < RUINED
    pictures = _paint(atlas, scenes, SIDES[moment % len(SIDES)], ruined, chance)
    return pictures, targets(scenes).masked_fill(ruined, NOTHING), scenes.objects


def _scatter(scenes: Scenes, chance: torch.Generator) -> Scenes:
    """Half of the scenes with their objects anywhere, rather small than large, less those that would cover others."""
    batch, slots = scenes.objects.shape
    draws = torch.rand(batch, slots, 4, generator=chance, device=chance.device)
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
    atlas: Tensor, scenes: Scenes, side: int, ruined: Bool[Tensor, "batch 1 1"], chance: torch.Generator
) -> Float[Tensor, "batch 3 128 128"]:
    """Pictures as a model may generate them: on other backgrounds, colours a little off, crooked, soft, noisy."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(len(scenes.objects), *shape, generator=chance, device=chance.device)

    colour = torch.where(rand(1) < 0.5, scenes.background, rand(3))
    slope = rand(1, 1) * (rand(3, 2) - 0.5)  # of a gradient, across and down
    place = (torch.arange(side, device=chance.device) + 0.5) / side - 0.5
    x, y = slope[..., :1, None] * place, slope[..., 1:, None] * place[:, None]
    background = (colour[..., None, None] + x + y).clamp(0, 1)
    on_black, on_white = (
        render(atlas, scenes._replace(background=torch.full_like(scenes.background, shade)), side)
        for shade in (0.0, 1.0)
    )
    picture = _resize(on_black + (on_white - on_black) * background)

    crooked = torch.where(ruined, 8 + 8 * rand(1, 1), rand(1, 1)) * 2 / SIDE  # from about so many pixels away
    field = torch.randn(len(picture), 2, 12, 12, generator=chance, device=chance.device) * crooked[..., None]
    still = F.affine_grid(torch.eye(2, 3, device=chance.device).expand(len(picture), 2, 3), list(picture.shape), False)
    grid = still + F.interpolate(field, (SIDE, SIDE), mode="bicubic").movedim(1, -1)
    picture = F.grid_sample(picture, grid, padding_mode="border", align_corners=False)

    mixing = torch.eye(3, device=chance.device) * (0.85 + 0.3 * rand(1, 1)) + 0.12 * (rand(3, 3) - 0.5)
    picture = (mixing @ picture.flatten(2) + 0.2 * (rand(3, 1) - 0.5)).unflatten(-1, (SIDE, SIDE))

    pixels, sigma = torch.arange(SIDE, device=chance.device), 0.3 + torch.where(ruined, 4.0, 1.2) * rand(1, 1).square()
    blur = (-((pixels[:, None] - pixels) / sigma).square() / 2).softmax(-1)[:, None]
    noise = torch.randn(picture.shape, generator=chance, device=chance.device)
    return (blur @ picture @ blur.mT + 0.1 * rand(1, 1, 1).square() * noise).clamp(0, 1)


def _resize(pictures: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch 3 128 128"]:
    if pictures.shape[-1] == SIDE:
        return pictures
    return F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True)


def _cells(device: torch.device | str) -> Float[Tensor, " 16"]:
    """The centres of the cells along one side of the picture."""
    return (torch.arange(GRID, device=device) + 0.5) / GRID
