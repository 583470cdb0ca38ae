"""The recogniser: a small network that finds emoji in images, to judge generated images.

Its training data are renderings of training scenes, never generated images.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from skimage.measure import label
from torch import Tensor, nn

from foveate.apps.demo import find
from foveate.apps.demo.atlas import OBJECT_NAMES
from foveate.apps.demo.scenes import Scene
from foveate.apps.web.report import Objects

__all__ = [
    "WEIGHTS",
    "Detection",
    "FrechetDistance",
    "Recogniser",
    "Seen",
    "Verdict",
    "cell_centres",
    "detect",
    "judge",
    "judge_prompt",
    "load_recogniser",
    "recognise",
    "to_side",
]

WEIGHTS = find("recogniser.safetensors")
SIDE, GRID, DIM = 128, 16, 128  # pixels and cells along a side, channels of the features
WORD = re.compile(r"[^\W_]+")
NOTHING = len(OBJECT_NAMES)  # class of the background
THRESHOLD = 0.5  # probability above which an object counts as found


class Seen(NamedTuple):
    """Output of the network: class logits of each cell (the last class is "nothing") and pooled features."""

    logits: Float[Tensor, "batch classes 16 16"]
    features: Float[Tensor, "batch dim"]


class Detection(NamedTuple):
    """An object found in an image.

    Attributes:
        object: Index into `OBJECT_NAMES`.
        x: Horizontal centre, as a fraction of the image's side.
        y: Vertical centre, as a fraction of the image's side.
        patches: Number of separate places with this object; more than 1 if it is repeated.
    """

    object: int
    x: float
    y: float
    patches: int = 1


class Verdict(NamedTuple):
    """Counts of found objects and relations of a scene; they can be summed over images."""

    objects_found: int
    objects: int
    relations_held: int
    relations: int
    extra: int
    """Unrequested objects, and repetitions of requested ones."""


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
    """Classifies each of 16 x 16 cells by the emoji whose centre it shows, or "nothing"; 1.2 M parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            _Residual(32, 64, stride=2),
            _Residual(64, DIM, stride=2),
            # the receptive field is 29 cells, more than the image has
            *(_Residual(DIM, DIM, dilation=dilation) for dilation in (1, 2, 4)),
        )
        self.head = nn.Conv2d(DIM, NOTHING + 1, 1)

    def forward(self, pictures: Float[Tensor, "batch 3 side side"]) -> Seen:
        """Logits and features of square images of any side, with values from 0 to 1."""
        features = self.body(4 * to_side(pictures) - 2)
        return Seen(self.head(features), features.mean((2, 3)))


def detect(seen: Seen) -> list[list[Detection]]:
    """Objects in each image, each once, centred on the mean of the cells where it is most probable."""
    chance = seen.logits.detach().float().softmax(1)
    won = chance * (chance == chance.amax(1, keepdim=True))  # each cell counts for its most probable class
    won, cells = won[:, :NOTHING].cpu(), cell_centres("cpu")
    patches = [_patches(picture) for picture in won]
    peak, mass = won.amax((2, 3)), won.sum((2, 3))
    x, y = won.sum(2) @ cells / mass, won.sum(3) @ cells / mass
    return [
        [
            Detection(index, float(x[row, index]), float(y[row, index]), patches[row][index])
            for index in (peak[row] > THRESHOLD).nonzero().flatten().tolist()
        ]
        for row in range(len(won))
    ]


def _patches(won: Float[Tensor, "objects 16 16"]) -> Counter[int]:
    """Number of connected patches of cells for each object."""
    chance, best = won.max(0)
    labels: Any = label(np.where(chance > 0, best + 1, 0), connectivity=2)
    sure = (chance > THRESHOLD).numpy()
    return Counter(index for _, index in set(zip(labels[sure].tolist(), best.numpy()[sure].tolist(), strict=True)))


def judge(detections: Sequence[Detection], scene: Scene) -> Verdict:
    """The verdict on an image of a scene.

    A relation holds if both objects were found and their offset fits: for "above" the sideways offset is at most twice
    the vertical one, for "left of" the vertical offset is at most twice the sideways one, for "beside" the vertical
    offset is smaller than the sideways one.
    """
    found = {detection.object: detection for detection in detections}
    spots = [found.get(index) for index in scene.objects]
    held = sum(_holds(relation.kind, spots[relation.first], spots[relation.second]) for relation in scene.relations)
    hits = len(spots) - spots.count(None)
    extra = sum(detection.patches for detection in detections) - hits
    return Verdict(hits, len(spots), held, len(scene.relations), extra)


def judge_prompt(prompt: str) -> Callable[[Image.Image], Objects] | None:
    """Return a function that counts a prompt's objects in an image; None if the prompt names no objects."""
    rest, wanted = f" {' '.join(WORD.findall(prompt.lower()))} ", Counter[int]()
    for index, name in sorted(enumerate(OBJECT_NAMES), key=lambda pair: -len(pair[1])):  # "red apple" before "apple"
        before, rest = rest, rest.replace(f" {name} ", " , ")
        wanted[index] += before != rest
    names = [index for index, count in wanted.items() if count]
    if not names:
        return None
    model = load_recogniser()

    def judge_picture(picture: Image.Image) -> Objects:
        pixels = torch.from_numpy(np.array(picture.convert("RGB").resize((SIDE, SIDE)))).permute(2, 0, 1)
        (seen,), _ = recognise(model, pixels[None])
        found = {detection.object for detection in seen} & {*names}
        return Objects(len(found), len(names), sum(detection.patches for detection in seen) - len(found))

    return judge_picture


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
    """Objects in each image, and features of the images, on the model's device.

    Args:
        model: Recogniser in eval mode.
        pictures: Images from 0 to 1, or bytes from 0 to 255, on any device.
        batch: Batch size.
    """
    device, scale = next(model.parameters()).device, 1.0 if pictures.is_floating_point() else 255.0
    detections: list[list[Detection]] = []
    features: list[Tensor] = []
    for part in pictures.split(batch):
        seen = model(part.to(device, torch.float32) / scale)
        detections += detect(seen)
        features.append(seen.features)
    return detections, torch.cat(features)


class FrechetDistance:
    """Frechet distance of sets of features to a reference set, as in FID (Heusel et al. 2017), in float64.

    |mean a - mean b|² + tr(A + B - 2 (B^½ A B^½)^½) with covariances A and B. It is biased upwards for few samples, so
    compare only sets of the same size.

    Args:
        real: Features of the reference set.
    """

    def __init__(self, real: Float[Tensor, "m dim"]) -> None:
        self.mean, self.root = _mean_and_root(real)

    def __call__(self, features: Float[Tensor, "n dim"]) -> float:
        """The distance of these features to the reference set."""
        mean, root = _mean_and_root(features)
        shared = torch.linalg.matrix_norm(root @ self.root.mT, "nuc")
        spread = root.square().sum() + self.root.square().sum() - 2 * shared
        return float((mean - self.mean).square().sum() + spread)


def _mean_and_root(features: Float[Tensor, "n dim"]) -> tuple[Tensor, Tensor]:
    """Mean, and a matrix R with at most `dim` rows for which RᵀR is the covariance.

    With such R of A and S of B, the eigenvalues of B^½ A B^½ are the squared singular values of R Sᵀ.
    """
    mean = features.double().mean(0)
    centred = (features.double() - mean) / (len(features) - 1) ** 0.5
    return mean, torch.linalg.qr(centred, mode="r").R


def load_recogniser(path: Path = WEIGHTS, device: torch.device | str = "cpu") -> Recogniser:
    """The trained recogniser in eval mode and float32.

    Raises:
        ValueError: If the file is missing or damaged.
    """
    with torch.device("meta"):
        model = Recogniser()
    try:
        model.load_state_dict(load_file(path), assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        state = "is damaged" if path.exists() else "is missing"
        raise ValueError(
            f"the recogniser's file {path} {state}: "
            "install foveate-models again, or train it with `python -m lab built-in --part recogniser`"
        ) from error
    return model.to(device, torch.float32).eval()


def to_side(pictures: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch 3 128 128"]:
    """The images, resized for the network."""
    if pictures.shape[-1] == SIDE:
        return pictures
    return F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True)


def cell_centres(device: torch.device | str) -> Float[Tensor, " 16"]:
    """Centres of the cells along a side, as fractions of the side."""
    return (torch.arange(GRID, device=device) + 0.5) / GRID
