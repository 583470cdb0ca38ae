"""A small network that says which emoji stand where: the yardstick of the pictures that a model generates.

It learns from renderings of training scenes alone and never sees a generated picture.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file
from skimage.measure import label
from torch import Tensor, nn

from foveate.demo import DATA
from foveate.demo.atlas import NAMES, load_atlas
from foveate.demo.scenes import Scene, Scenes, render
from foveate.demo.scenes import scenes as random_scenes

__all__ = [
    "WEIGHTS",
    "Detection",
    "FrechetDistance",
    "Recogniser",
    "Seen",
    "Verdict",
    "accuracy",
    "detect",
    "judge",
    "load_recogniser",
    "recognise",
    "targets",
    "to_side",
]

WEIGHTS = DATA / "recogniser.safetensors"
SIDE, GRID, DIM = 128, 16, 128  # pixels, cells and channels that the network works with
NOTHING, OPEN = len(NAMES), -100
THRESHOLD = 0.5  # probability from which on an object counts as found


class Seen(NamedTuple):
    """What the network makes of pictures: the classes of each cell (the last is "nothing"), and pooled features."""

    logits: Float[Tensor, "batch classes 16 16"]
    features: Float[Tensor, "batch dim"]


class Detection(NamedTuple):
    """An object that was found.

    Attributes:
        object: Which one, an index into `NAMES`.
        x: Its centre, as a fraction of the picture's side.
        y: Likewise.
        confidence: Its highest probability.
        patches: In how many places that do not touch it was found; 1 unless it was drawn several times.
    """

    object: int
    x: float
    y: float
    confidence: float
    patches: int = 1


class Verdict(NamedTuple):
    """How much of a scene a picture shows, in counts, so that verdicts can be added up."""

    objects_found: int
    objects: int
    relations_held: int
    relations: int
    extra: int
    """Objects that nobody asked for, and repetitions of one that was."""

    @property
    def all_right(self) -> bool:
        """Whether every object was found and every relation holds, whatever extra there is."""
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
        features = self.body(4 * to_side(pictures) - 2)
        return Seen(self.head(features), features.mean((2, 3)))


def targets(scenes: Scenes) -> Int[Tensor, "batch 16 16"]:
    """What the network should say of each cell of a scene's picture.

    An object where the cell's centre lies in the middle half of its box, the last class outside every box, and
    -100, "open", in between. Later objects stand in front.
    """
    cells = _cells(scenes.boxes.device)
    target = torch.full((len(scenes.objects), GRID, GRID), NOTHING, device=cells.device)
    for slot in range(scenes.objects.shape[1]):
        index = scenes.objects[:, slot, None, None]
        x, y, size = scenes.boxes[:, slot, :, None].unbind(1)
        across, down = (cells - x).abs() / size, (cells - y).abs() / size
        distance = torch.maximum(across[:, None, :], down[:, :, None])  # in sides of the box
        target = torch.where((index >= 0) & (distance < 1 / 2), OPEN, target)
        target = torch.where((index >= 0) & (distance < 1 / 4), index, target)
    return target


def detect(seen: Seen) -> list[list[Detection]]:
    """The objects found in each picture, each once: its centre is the mean of the cells where it is most probable."""
    chance = seen.logits.detach().float().softmax(1)
    won = chance * (chance == chance.amax(1, keepdim=True))  # a cell belongs to one class
    won, cells = won[:, :NOTHING].cpu(), _cells("cpu")
    patches = [_patches(picture) for picture in won]
    peak, mass = won.amax((2, 3)), won.sum((2, 3))
    x, y = won.sum(2) @ cells / mass, won.sum(3) @ cells / mass
    return [
        [
            Detection(index, float(x[row, index]), float(y[row, index]), float(peak[row, index]), patches[row][index])
            for index in (peak[row] > THRESHOLD).nonzero().flatten().tolist()
        ]
        for row in range(len(won))
    ]


def _patches(won: Float[Tensor, "objects 16 16"]) -> Counter[int]:
    """How many patches of adjacent cells each object has, counting those in which it is found."""
    chance, best = won.max(0)
    labels: Any = label(np.where(chance > 0, best + 1, 0), connectivity=2)  # neighbours of one object get one number
    sure = (chance > THRESHOLD).numpy()
    return Counter(index for _, index in set(zip(labels[sure].tolist(), best.numpy()[sure].tolist(), strict=True)))


def judge(detections: Sequence[Detection], scene: Scene) -> Verdict:
    """How much of a scene was found.

    A relation holds if both its objects were found and stand so: "above" allows twice as much aside as down, "left
    of" twice as much up or down as aside, "beside" less up or down than aside. A scene without relations has 0 of 0.
    """
    found = {detection.object: detection for detection in detections}
    spots = [found.get(index) for index in scene.objects]
    held = sum(_holds(relation.kind, spots[relation.first], spots[relation.second]) for relation in scene.relations)
    hits = len(spots) - spots.count(None)
    extra = sum(detection.patches for detection in detections) - hits
    return Verdict(hits, len(spots), held, len(scene.relations), extra)


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


class FrechetDistance:
    """How far sets of features lie from these, each taken for a Gaussian; 0 for the same mean and covariance.

    |mean a - mean b|² + tr(A + B - 2 (B^½ A B^½)^½) with their covariances A and B (Heusel et al. 2017, "FID"), in
    float64. It is biased upwards for few samples: compare only numbers of as many.

    Args:
        real: The features to compare with.
    """

    def __init__(self, real: Float[Tensor, "m dim"]) -> None:
        self.mean, covariance = real.double().mean(0), torch.cov(real.double().mT)
        values, vectors = torch.linalg.eigh(covariance)
        self.trace, self.root = covariance.trace(), vectors * values.clamp(min=0).sqrt() @ vectors.mT

    def __call__(self, features: Float[Tensor, "n dim"]) -> float:
        """The distance of these."""
        mean, covariance = features.double().mean(0), torch.cov(features.double().mT)
        shared = torch.linalg.eigvalsh(self.root @ covariance @ self.root).clamp(min=0).sqrt().sum()
        return float((mean - self.mean).square().sum() + covariance.trace() + self.trace - 2 * shared)


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
            f"the recogniser's file {path} {state}: "
            "install foveate again, or make it with `python -m lab built-in --part recogniser`"
        ) from error
    return model.to(device, torch.float32).eval()


def to_side(pictures: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch 3 128 128"]:
    """The pictures at the size that the network works with."""
    if pictures.shape[-1] == SIDE:
        return pictures
    return F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True)


def _cells(device: torch.device | str) -> Float[Tensor, " 16"]:
    """The centres of the cells along one side of the picture."""
    return (torch.arange(GRID, device=device) + 0.5) / GRID
