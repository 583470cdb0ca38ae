# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
"""Training data of the built-in model: random scenes in stages, small images first.

The data of step n of a stage depends on n and the seed only, so a resumed run gets the data of an uninterrupted run.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from diffusers import FluxPipeline
from torch import Tensor
from torch.utils.data import Dataset

from foveate.apps.demo.scenes import Scenes, scenes
from foveate.apps.demo.text import TEXT_TOKENS

__all__ = ["LONG_TEXT", "LONG_TEXT_EACH", "RECIPE", "UNCAPTIONED", "Batch", "ImageBatches", "Stage", "token_ids"]

UNCAPTIONED = 0.1  # fraction of the images without a caption
LONG_TEXT, LONG_TEXT_EACH = 512, 32  # one step in 32 pads to FLUX's default of 512 text tokens
WARM_UP = 200  # steps


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the training.

    Attributes:
        name: Name in recipe.json, which seeds the batches.
        images: Number of images over all devices.
        batches: {side in px, or (frames, side): batch size on a device}; every step uses one of the sizes.
        rates: Learning rate at the start and at the end of the stage, interpolated linearly.
    """

    name: str
    images: int
    batches: dict[Any, int]
    rates: tuple[float, float]

    def steps(self, devices: int) -> int:
        """Number of steps for `images` images when every size is equally frequent."""
        a_step = devices * sum(self.batches.values()) / len(self.batches)
        return math.ceil(self.images / a_step)

    def scaled(self, images: float, batch: float) -> "Stage":
        """The stage with its images and its batch sizes multiplied."""
        batches = {size: max(1, round(count * batch)) for size, count in self.batches.items()}
        return replace(self, images=math.ceil(self.images * images), batches=batches)

    def about(self) -> dict[str, Any]:
        """The stage, ready for JSON."""
        return {**asdict(self), "batches": {str(size): count for size, count in self.batches.items()}}

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step."""
        first, last = self.rates
        return (first + (last - first) * step / steps) * min(1, (step + 1) / WARM_UP)


RECIPE = (  # batches are for four H200s
    Stage(name="draft", images=2_000_000, batches={64: 512}, rates=(1.2e-3, 1e-3)),
    Stage(name="small", images=1_300_000, batches={128: 160}, rates=(8e-4, 5e-4)),
    Stage(name="large", images=900_000, batches={128: 160, 256: 40}, rates=(4e-4, 2.5e-4)),
    Stage(name="largest", images=120_000, batches={128: 64, 256: 32, 512: 16}, rates=(4e-4, 0.0)),
)


class Batch(NamedTuple):
    """Scenes and captions of one step."""

    side: int
    scenes: Scenes
    clip_ids: Tensor
    t5_ids: Tensor

    @property
    def text(self) -> tuple[Tensor, Tensor]:
        """Token ids of the captions."""
        return self.clip_ids, self.t5_ids


class ImageBatches(Dataset[Batch]):
    """Batches of a stage, step by step, each step with the batches of all devices."""

    def __init__(self, stage: Stage, pipeline: FluxPipeline, seed: int, devices: int):
        self.stage, self.seed, self.devices = stage, seed, devices
        self.clip, self.t5 = pipeline.tokenizer, pipeline.tokenizer_2

    def __getitem__(self, index: int) -> Batch:
        step, device = divmod(index, self.devices)
        everywhere = random.Random(f"{self.stage.name} {self.seed} {step}")  # all devices use the same size
        side = everywhere.choice(list(self.stage.batches))
        long = len(self.stage.batches) > 1 and everywhere.randrange(LONG_TEXT_EACH) == 0
        number = everywhere.randrange(2**40) + device
        batch = list(itertools.islice(scenes(number), self.stage.batches[side]))
        here = random.Random(number)
        captions = ["" if here.random() < UNCAPTIONED else scene.caption for scene in batch]
        clip_ids = token_ids(self.clip, captions, TEXT_TOKENS)
        return Batch(
            side, Scenes.of(batch), clip_ids, token_ids(self.t5, captions, LONG_TEXT if long else TEXT_TOKENS)
        )


def token_ids(tokenizer: Callable, captions: list[str], length: int) -> Tensor:
    """Token ids [captions, length], padded as the pipeline pads them."""
    padded = {"padding": "max_length", "max_length": length, "truncation": True}
    return tokenizer(captions, **padded, return_tensors="pt").input_ids
