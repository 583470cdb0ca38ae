"""How well the recogniser of the built-in model reads scenes."""

from itertools import islice

from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.recogniser import judge, recognise
from foveate.apps.demo.scenes import Scenes, render
from foveate.apps.demo.scenes import scenes as random_scenes


def all_right(verdict):
    """Whether every object was found and every relation holds; extra objects are allowed."""
    return (verdict.objects_found, verdict.relations_held) == (verdict.objects, verdict.relations)


def accuracy(model, *, scenes: int, seed: int, side: int = 128):
    """On renderings of evaluation scenes: the fraction of objects found, and of scenes without any mistake."""
    some = list(islice(random_scenes(seed, evaluation=True), scenes))
    found, _ = recognise(model, render(load_atlas(), Scenes.of(some), side))
    verdicts = list(map(judge, found, some))
    return sum(v.objects_found for v in verdicts) / sum(v.objects for v in verdicts), (
        sum(map(all_right, verdicts)) / scenes
    )
