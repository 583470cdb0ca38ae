"""Random scenes of emoji: their captions, the positions of the objects, and their images."""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foveate.apps.demo.atlas import OBJECT_NAMES, load_atlas

__all__ = [
    "BACKGROUNDS",
    "LAYOUTS",
    "Layout",
    "Relation",
    "Scene",
    "ScenePictures",
    "Scenes",
    "captions",
    "render",
    "scenes",
]

BACKGROUNDS = {
    "white": (255, 255, 255),
    "gray": (160, 165, 170),
    "black": (30, 30, 34),
    "red": (214, 72, 66),
    "orange": (246, 164, 84),
    "yellow": (250, 226, 124),
    "green": (126, 196, 128),
    "blue": (104, 164, 232),
    "purple": (166, 124, 208),
    "pink": (250, 184, 204),
    "brown": (146, 106, 78),
    "turquoise": (112, 212, 208),
}
SLOTS = 3  # most objects in an image
HELD_OUT_EACH = 20  # one of 20 combinations of objects and background is held out from training
UNSAID = 0.15  # fraction of the captions without the background


class Relation(NamedTuple):
    """Required relation: object `first` is "above", "left of" or "beside" object `second`."""

    first: int
    kind: str
    second: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a sentence's objects: positions (x, y in the unit square), sizes, jitter and relations."""

    sentence: str
    places: tuple[tuple[float, float], ...]
    sizes: tuple[float, float]
    jitter: tuple[float, float]
    relations: tuple[Relation, ...] = ()


_UPPER, _LOWER, _LEFT, _RIGHT = (0.5, 0.27), (0.5, 0.73), (0.27, 0.5), (0.73, 0.5)
_COLUMN, _ROW = {"sizes": (0.34, 0.44), "jitter": (0.15, 0.03)}, {"sizes": (0.34, 0.44), "jitter": (0.03, 0.15)}
_TRIANGLE = {"sizes": (0.34, 0.42), "jitter": (0.04, 0.03)}
_THREE = {"sizes": (0.26, 0.31), "jitter": (0.01, 0.15)}
LAYOUTS = (
    Layout(sentence="{0}", places=((0.5, 0.5),), sizes=(0.5, 0.75), jitter=(0.08, 0.08)),
    Layout(sentence="{0} above {1}", places=(_UPPER, _LOWER), relations=(Relation(0, "above", 1),), **_COLUMN),
    Layout(sentence="{0} below {1}", places=(_LOWER, _UPPER), relations=(Relation(1, "above", 0),), **_COLUMN),
    Layout(sentence="{0} to the left of {1}", places=(_LEFT, _RIGHT), relations=(Relation(0, "left of", 1),), **_ROW),
    Layout(sentence="{0} to the right of {1}", places=(_RIGHT, _LEFT), relations=(Relation(1, "left of", 0),), **_ROW),
    Layout(sentence="{0} next to {1}", places=(_LEFT, _RIGHT), relations=(Relation(0, "beside", 1),), **_ROW),
    Layout(
        sentence="{0}, {1} and {2}",
        places=((0.18, 0.5), (0.5, 0.5), (0.82, 0.5)),
        relations=(Relation(0, "left of", 1), Relation(1, "left of", 2)),
        **_THREE,
    ),
    Layout(
        sentence="{0} between {1} and {2}",
        places=((0.5, 0.5), (0.18, 0.5), (0.82, 0.5)),
        relations=(Relation(1, "left of", 0), Relation(0, "left of", 2)),
        **_THREE,
    ),
    Layout(
        sentence="{0} above {1} and {2}",
        places=((0.5, 0.27), (0.27, 0.73), (0.73, 0.73)),
        relations=(Relation(0, "above", 1), Relation(0, "above", 2), Relation(1, "left of", 2)),
        **_TRIANGLE,
    ),
    Layout(
        sentence="{0} below {1} and {2}",
        places=((0.5, 0.73), (0.27, 0.27), (0.73, 0.27)),
        relations=(Relation(1, "above", 0), Relation(2, "above", 0), Relation(1, "left of", 2)),
        **_TRIANGLE,
    ),
)


@dataclass(frozen=True)
class Scene:
    """A caption and the scene that it describes."""

    caption: str
    objects: tuple[int, ...]
    """Indices into `OBJECT_NAMES`, in the order of the sentence."""
    boxes: tuple[tuple[float, float, float], ...]
    """(x, y, side) of each object: centre and size as fractions of the image's side."""
    background: str
    relations: tuple[Relation, ...]

    @property
    def held_out(self) -> bool:
        """Whether this combination of objects and background is held out for evaluation."""
        words = ",".join([*sorted(OBJECT_NAMES[index] for index in self.objects), self.background])
        return zlib.crc32(words.encode()) % HELD_OUT_EACH == 0


def scenes(seed: int, *, evaluation: bool = False) -> Iterator[Scene]:
    """An endless stream of random scenes, for training or held out.

    Args:
        seed: The same seed gives the same scenes.
        evaluation: Yield held-out combinations, whose captions always name the background, instead of the others.
    """
    chance = random.Random(f"{'evaluation' if evaluation else 'training'} {seed}")
    while True:
        scene = _scene(chance, 0.0 if evaluation else UNSAID)
        if scene.held_out == evaluation:
            yield scene


def _scene(chance: random.Random, unsaid: float) -> Scene:
    count = chance.randint(1, SLOTS)
    layout = chance.choice([layout for layout in LAYOUTS if len(layout.places) == count])
    objects = tuple(chance.sample(range(len(OBJECT_NAMES)), count))
    background = chance.choice(list(BACKGROUNDS))
    said = chance.random() >= unsaid
    sentence = layout.sentence.format(*(OBJECT_NAMES[index] for index in objects))
    boxes = tuple(
        (x + chance.uniform(-1, 1) * layout.jitter[0], y + chance.uniform(-1, 1) * layout.jitter[1], side)
        for (x, y), side in ((place, chance.uniform(*layout.sizes)) for place in layout.places)
    )
    article = "an" if background == "orange" else "a"
    ending = f" on {article} {background} background" if said else ""
    return Scene(sentence + ending, objects, boxes, background, layout.relations)


def captions(count: int, seed: int, *, evaluation: bool = False) -> list[str]:
    """First captions of `scenes`."""
    return [scene.caption for scene in islice(scenes(seed, evaluation=evaluation), count)]


class Scenes(NamedTuple):
    """A batch of scenes as tensors; unused object slots are -1."""

    objects: Int[Tensor, "batch slots"]
    boxes: Float[Tensor, "batch slots 3"]
    background: Float[Tensor, "batch 3"]

    @classmethod
    def of(cls, batch: Sequence[Scene]) -> "Scenes":
        """The scenes as tensors, without captions."""
        empty = SLOTS * (-1,), SLOTS * ((0.5, 0.5, 1.0),)
        return cls(
            torch.tensor([(*scene.objects, *empty[0])[:SLOTS] for scene in batch]),
            torch.tensor([(*scene.boxes, *empty[1])[:SLOTS] for scene in batch]),
            torch.tensor([BACKGROUNDS[scene.background] for scene in batch]) / 255,
        )

    def to(self, device: torch.device | str) -> "Scenes":
        """The batch on a device."""
        return Scenes(*(part.to(device, non_blocking=True) for part in self))


def render(atlas: Float[Tensor, "emoji 4 cell cell"], scenes: Scenes, side: int) -> Float[Tensor, "batch 3 side side"]:
    """The images of scenes, from 0 to 1, on the device of the atlas. Later objects are in front."""
    picture = scenes.background[:, :, None, None].expand(-1, -1, side, side).to(atlas)
    for slot in range(scenes.objects.shape[1]):
        index, (x, y, size) = scenes.objects[:, slot], scenes.boxes[:, slot].to(atlas).unbind(-1)
        emoji = atlas[index.clamp(min=0)] * (index >= 0)[:, None, None, None]
        cell = atlas.shape[-1]
        rows, columns = _resample(y, size, side, cell), _resample(x, size, side, cell)
        drawn = rows[:, None] @ emoji @ columns[:, None].mT
        picture = drawn[:, :3] + (1 - drawn[:, 3:]) * picture
    return picture.clamp(0, 1)


class ScenePictures:
    """Endless training scenes by number, without the held-out ones: a `foveate.training.pictures.Pictures`.

    Args:
        seed: The same seed gives the same scenes.
    """

    count = None
    captioned = True

    def __init__(self, seed: int):
        self.seed, self.checksum = seed, f"scenes {seed}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """An image of (height, width) pixels from -1 to 1, and its caption.

        Raises:
            ValueError: If height and width differ.
        """
        height, width = size
        if height != width:
            raise ValueError(f"scenes are square: use {height} or {width} for {width} x {height} px")
        scene = next(scenes(self.seed * 2**40 + index))
        return render(self._atlas, Scenes.of([scene]), height)[0] * 2 - 1, scene.caption

    @cached_property
    def _atlas(self) -> Float[Tensor, "emoji 4 cell cell"]:
        return load_atlas()


def _resample(
    centre: Float[Tensor, " batch"], size: Float[Tensor, " batch"], side: int, cell: int
) -> Float[Tensor, "batch side cell"]:
    """Weights of an antialiased bilinear resize from `cell` source pixels to `side` target pixels, 0 outside."""
    pixels = (torch.arange(side, device=centre.device) + 0.5) / side
    scale = size * side / cell  # target pixels per source pixel
    position = ((pixels - centre[:, None]) / size[:, None] + 0.5) * cell - 0.5  # in source pixels
    distance = (position[:, :, None] - torch.arange(cell, device=centre.device)).abs()
    width = (1 / scale).clamp(min=1)[:, None, None]
    weights = (1 - distance / width).clamp(min=0)
    inside = weights.sum(-1, keepdim=True)  # part of the filter inside the source; its whole area is its width
    return weights / torch.where(inside > 0.5 * width, inside, width)
