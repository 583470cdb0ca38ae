"""Random scenes of emoji that move: their captions, and their videos."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foveate.apps.demo.atlas import OBJECT_NAMES
from foveate.apps.demo.scenes import BACKGROUNDS, Scene, Scenes, render, scenes

__all__ = ["DIRECTIONS", "SENTENCES", "MovingScene", "frame_scenes", "moving_scenes", "render_frames", "scene_videos"]

DIRECTIONS = {"to the right": (1, 0), "to the left": (-1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps (x, y) of each direction; y grows downwards."""
SENTENCES = ("{0} moves {direction}", "{0} moves {direction} {place} {1}")
PLACES = {0: {"above": (0, -1), "below": (0, 1)}, 1: {"to the left of": (-1, 0), "to the right of": (1, 0)}}
"""Position (x, y) of the moving object relative to the other, by the axis of movement."""
DISTANCE = 0.46  # distance of the movement, as a fraction of the side
APART = 0.25  # distance of each of two objects from the middle, across the movement
SIZES = {1: (0.4, 0.5), 2: (0.34, 0.42)}
STILL = 0.2  # fraction of the scenes in which nothing moves


class MovingScene(NamedTuple):
    """A scene in the middle of a video, and the path (x, y) of each object over the video, in sides of the frame."""

    scene: Scene
    ways: tuple[tuple[float, float], ...]


def moving_scenes(seed: int, *, evaluation: bool = False) -> Iterator[MovingScene]:
    """An endless stream of random scenes, for training or held out.

    Args:
        seed: The same seed gives the same scenes.
        evaluation: Yield held-out combinations of objects and background, in which one object always moves, instead of
            training combinations.
    """
    chance = random.Random(f"moving {'evaluation' if evaluation else 'training'} {seed}")
    still = scenes(seed, evaluation=evaluation)
    while True:
        if not evaluation and chance.random() < STILL:
            scene = next(still)
            yield MovingScene(scene, ((0.0, 0.0),) * len(scene.objects))
            continue
        moving = _moving(chance)
        if moving.scene.held_out == evaluation:
            yield moving


def _moving(chance: random.Random) -> MovingScene:
    count = chance.randint(1, 2)
    direction, way = chance.choice(list(DIRECTIONS.items()))
    objects = tuple(chance.sample(range(len(OBJECT_NAMES)), count))
    background = chance.choice(list(BACKGROUNDS))
    place, side = chance.choice(list(PLACES[way[0] == 0].items()))
    names = [OBJECT_NAMES[index] for index in objects]
    sentence = SENTENCES[count - 1].format(*names, direction=direction, place=place)
    centres = [(0.5 + APART * sign * side[0], 0.5 + APART * sign * side[1]) for sign in (1, -1)]
    boxes = [(x + chance.uniform(-0.02, 0.02), y + chance.uniform(-0.02, 0.02)) for x, y in centres]
    if count == 1:
        boxes = [(0.5 + abs(way[1]) * chance.uniform(-0.2, 0.2), 0.5 + abs(way[0]) * chance.uniform(-0.2, 0.2))]
    article = "an" if background == "orange" else "a"
    scene = Scene(
        f"{sentence} on {article} {background} background",
        objects,
        tuple((*box, chance.uniform(*SIZES[count])) for box in boxes),
        background,
        (),
    )
    return MovingScene(scene, ((way[0] * DISTANCE, way[1] * DISTANCE), (0.0, 0.0))[:count])


def moved(moving: MovingScene, time: float) -> Scene:
    """The scene at a time from -1/2 to 1/2."""
    pairs = zip(moving.scene.boxes, moving.ways, strict=True)
    return replace(moving.scene, boxes=tuple((x + time * dx, y + time * dy, side) for (x, y, side), (dx, dy) in pairs))


def frame_scenes(moving: Sequence[MovingScene], frames: int) -> Scenes:
    """Scenes of all frames, video by video."""
    times = [frame / (frames - 1) - 0.5 for frame in range(frames)] if frames > 1 else [0.0]
    return Scenes.of([moved(one, time) for one in moving for time in times])


def render_frames(
    atlas: Float[Tensor, "emoji 4 cell cell"], shown: Scenes, frames: int, side: int
) -> Float[Tensor, "batch 3 frames side side"]:
    """Videos with values from 0 to 1 of the scenes of `frame_scenes`, on the device of the atlas."""
    parts = (x.split(256) for x in shown.to(atlas.device))
    pictures = [render(atlas, Scenes(*part), side) for part in zip(*parts, strict=True)]
    return torch.cat(pictures).unflatten(0, (-1, frames)).transpose(1, 2)


def scene_videos(atlas: Tensor, seed: int, pixels: int, size: tuple[int, int]) -> Tensor:
    """Renderings of random videos [batch, 3, frames, side, side] from -1 to 1, with about this many pixels in all.

    Args:
        atlas: The emoji.
        seed: Seed of the scenes.
        pixels: Pixels of the batch, over all frames.
        size: (frames, side in px).
    """
    frames, side = size
    batch = list(itertools.islice(moving_scenes(seed), max(1, pixels // (frames * side**2))))
    return render_frames(atlas, frame_scenes(batch, frames), frames, side) * 2 - 1
