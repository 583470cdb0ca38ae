"""Laws of the scenes: images show what captions say, and held-out scenes are never trained on."""

import itertools
import re

import numpy as np
import pytest
import torch
from PIL import Image

from foveate.apps.demo.atlas import OBJECT_NAMES, load_atlas
from foveate.apps.demo.scenes import BACKGROUNDS, LAYOUTS, Scene, Scenes, render, scenes

NAME = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(OBJECT_NAMES, key=len, reverse=True)))})(?= |,|$)")
WHERE = {  # what an English reader takes the words to mean; boxes are (x, y, side), y grows downwards
    "above": lambda a, b: a[1] < b[1],
    "below": lambda a, b: a[1] > b[1],
    "to the left of": lambda a, b: a[0] < b[0],
    "to the right of": lambda a, b: a[0] > b[0],
    "next to": lambda a, b: abs(a[0] - b[0]) > abs(a[1] - b[1]),
}


def some(count, seed=0, **options):
    return list(itertools.islice(scenes(seed, **options), count))


def test_scenes_depend_on_the_seed_only():
    assert some(50, seed=3) == some(50, seed=3)
    assert some(50, seed=3) != some(50, seed=4)


@pytest.mark.parametrize("evaluation", [False, True])
def test_scenes_are_what_their_captions_say(evaluation):
    for scene in some(600, evaluation=evaluation):
        names = [OBJECT_NAMES[index] for index in scene.objects]
        sentence, _, background = scene.caption.partition(" on a")
        assert background in ("", f" {scene.background} background", f"n {scene.background} background")
        assert len(set(names)) == len(names)
        assert NAME.findall(sentence) == names
        words, boxes = NAME.split(sentence)[1].strip(), scene.boxes
        if len(names) == 2:
            assert WHERE[words](*boxes)
        elif words == ",":
            assert boxes[0][0] < boxes[1][0] < boxes[2][0]
        elif words == "between":
            assert boxes[1][0] < boxes[0][0] < boxes[2][0]
        elif len(names) == 3:
            assert all(WHERE[words](boxes[0], other) for other in boxes[1:])


def test_relations_hold_between_the_boxes():
    holds = {"above": WHERE["above"], "left of": WHERE["to the left of"], "beside": WHERE["next to"]}
    for scene in some(300):
        for first, kind, second in scene.relations:
            assert holds[kind](scene.boxes[first], scene.boxes[second])


def test_objects_stay_inside_the_picture_and_apart():
    for scene in some(500):
        for x, y, side in scene.boxes:
            assert side / 2 - 0.05 < x < 1.05 - side / 2
            assert side / 2 - 0.05 < y < 1.05 - side / 2
        for (x, y, a), (u, v, b) in itertools.combinations(scene.boxes, 2):
            assert max(abs(x - u), abs(y - v)) > 0.9 * (a + b) / 2


def test_held_out_scenes_are_never_trained_on():
    training, evaluation = some(10_000), some(1_000, evaluation=True)
    assert not any(scene.held_out for scene in training)
    assert all(scene.held_out for scene in evaluation)
    assert not {scene.caption for scene in training} & {scene.caption for scene in evaluation}
    combination = lambda scene: (frozenset(scene.objects), scene.background)  # noqa: E731
    assert not set(map(combination, training)) & set(map(combination, evaluation))


def test_every_object_background_and_sentence_occurs():
    training = some(5_000)
    assert {index for scene in training for index in scene.objects} == set(range(len(OBJECT_NAMES)))
    assert {scene.background for scene in training} == set(BACKGROUNDS)
    assert len({len(scene.objects) for scene in training}) == 3
    assert len({NAME.sub("", scene.caption.partition(" on a")[0]) for scene in training}) == len(LAYOUTS)


def test_at_least_150_emoji():
    assert len(OBJECT_NAMES) >= 150
    assert load_atlas().shape == (len(OBJECT_NAMES), 4, 128, 128)


@pytest.mark.parametrize("side", [64, 128, 250])
def test_a_rendering_is_what_pillow_pastes(side):
    atlas, scene = load_atlas(), next(scene for scene in scenes(5) if len(scene.objects) == 3)
    ours = render(atlas, Scenes.of([scene]), side)[0].permute(1, 2, 0).numpy()
    large = 4 * side  # Pillow pastes whole pixels: four times as large, then reduced
    canvas = Image.new("RGB", (large, large), BACKGROUNDS[scene.background])
    for index, (x, y, size) in zip(scene.objects, scene.boxes, strict=True):
        colour, alpha = atlas[index, :3], atlas[index, 3:]
        straight = torch.cat([colour / alpha.clamp(min=1e-6), alpha]).clamp(0, 1)
        emoji = Image.fromarray((straight.permute(1, 2, 0) * 255).round().byte().numpy(), "RGBA")
        pixels = round(size * large)
        emoji = emoji.resize((pixels, pixels), Image.Resampling.BILINEAR)
        canvas.paste(emoji, (round(x * large - pixels / 2), round(y * large - pixels / 2)), emoji)
    theirs = np.asarray(canvas.resize((side, side), Image.Resampling.BOX)) / 255
    assert np.abs(ours - theirs).mean() < 0.008
    assert np.square(ours - theirs).mean() < 10**-2.8


def test_an_empty_slot_draws_nothing():
    alone = Scene("", (4,), ((0.5, 0.5, 0.5),), "blue", ())
    nothing = Scene("", (), (), "blue", ())
    pictures = render(load_atlas(), Scenes.of([alone, nothing]), 64)
    assert (pictures[1] == pictures[1, :, :1, :1]).all()
    assert (pictures[0, :, 0] == pictures[1, :, 0]).all()
    assert (pictures[0, :, 32, 32] != pictures[1, :, 32, 32]).any()
