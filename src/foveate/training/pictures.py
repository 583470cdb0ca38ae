# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportMissingImports=false
"""What a pixel model learns from: pictures and captions of a folder or a data set, under noise."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

import torch
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from foveate.diffusers.pixel_pipeline import noise_scale
from foveate.training.pairs import PICTURES, chance

__all__ = ["FolderPictures", "HubPictures", "NoisyPicture", "NoisyPictures", "Pictures"]

LEVELS = 1000  # of noise
CAPTIONS = ("text", "caption", "prompt", "label")  # columns of a data set, the first that there is


@runtime_checkable
class Pictures(Protocol):
    """Pictures by number."""

    @property
    def count(self) -> int | None:
        """How many there are; None if they never end."""
        ...

    @property
    def captioned(self) -> bool:
        """Whether they have captions."""
        ...

    @property
    def checksum(self) -> str:
        """Tells them apart from others."""
        ...

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """A picture of (height, width) pixels from -1 to 1, and its caption."""
        ...


class FolderPictures:
    """The pictures of a folder and its subfolders by name, with captions if there are .txt files beside them.

    Raises:
        ValueError: If there is no picture, or only some have captions.
    """

    def __init__(self, folder: Path):
        self.files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
        if not self.files:
            raise ValueError(f"{folder} holds no pictures: name a folder of {', '.join(PICTURES)} files")
        without = [path for path in self.files if not path.with_suffix(".txt").is_file()]
        self.count, self.captioned = len(self.files), len(without) < len(self.files)
        if without and self.captioned:
            raise ValueError(f"{without[0]} has no caption and others have: put one into {without[0].stem}.txt")
        names = [str(path.relative_to(folder)) for path in self.files]
        self.checksum = f"{crc32(json.dumps([names, self.captioned]).encode()):08x}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """The middle of a picture, as large as its shape allows, and its caption."""
        path = self.files[index]
        with Image.open(path) as file:
            pixels = _fitted(file, size)
        return pixels, path.with_suffix(".txt").read_text().strip() if self.captioned else ""


class HubPictures:
    """The pictures of a data set of the Hugging Face Hub, with its captions or the names of its classes.

    Raises:
        ValueError: If the library `datasets` is missing, or there are no pictures in the data set.
    """

    def __init__(self, name: str, split: str = "train"):
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(
                f"{name} is no folder, and data sets need a library ({error}): pip install datasets, or name a folder"
            ) from error
        self.data = load_dataset(name, split=split)
        kinds = {column: type(feature).__name__ for column, feature in self.data.features.items()}
        pictures = [column for column, kind in kinds.items() if kind == "Image"]
        if not pictures:
            raise ValueError(f"{name} has no pictures among its columns {', '.join(kinds)}: name another data set")
        self.column, self.caption = pictures[0], next((column for column in CAPTIONS if column in kinds), None)
        self.count, self.captioned = len(self.data), self.caption is not None
        self.checksum = f"{name} {split} {self.count}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """The middle of a picture, as large as its shape allows, and its caption."""
        row = self.data[index]
        return _fitted(row[self.column], size), self._said(row)

    def _said(self, row: dict[str, Any]) -> str:
        if self.caption is None:
            return ""
        names = getattr(self.data.features[self.caption], "names", None)  # of classes
        return names[row[self.caption]] if names else str(row[self.caption])


def _fitted(picture: Image.Image, size: tuple[int, int]) -> Float[Tensor, "3 height width"]:
    return VaeImageProcessor(vae_scale_factor=1).preprocess(picture.convert("RGB"), *size, resize_mode="crop")[0]


class NoisyPicture(NamedTuple):
    """A picture under noise, or a batch of them.

    Attributes:
        pixels: (1 - level) picture + level scale noise.
        velocity: What the model is to say: scale noise - picture.
        level: From 0 (picture) to 1 (noise).
        words: Numbers of the caption's tokens; none without captions.
    """

    pixels: Float[Tensor, "*batch 3 height width"]
    velocity: Float[Tensor, "*batch 3 height width"]
    level: Float[Tensor, "*batch"]
    words: Int[Tensor, "*batch words"]


class NoisyPictures(Dataset[NoisyPicture]):
    """Pictures of one size under random noise, epoch after epoch: sample n follows from n and the seed alone.

    Args:
        pictures: What they are made of.
        size: (height, width) in pixels.
        seed: Of order, noise and empty captions.
        tokenizer: Reads the captions, if the model takes any.
        uncaptioned: Fraction of the pictures whose caption is left empty.
    """

    def __init__(
        self, pictures: Pictures, size: tuple[int, int], seed: int, tokenizer: Any = None, uncaptioned: float = 0.0
    ):
        self.pictures, self.size, self.seed = pictures, size, seed
        self.tokenizer, self.uncaptioned = tokenizer, uncaptioned

    def __getitem__(self, number: int) -> NoisyPicture:
        clean, caption = self.pictures.picture(self._index(number), self.size)
        own = chance("picture", self.seed, number)
        level = torch.randint(1, LEVELS + 1, (), generator=own) / LEVELS
        noise = noise_scale(*self.size) * torch.randn(clean.shape, generator=own)
        said = torch.rand((), generator=own) >= self.uncaptioned
        pixels = (1 - level) * clean + level * noise
        return NoisyPicture(pixels, noise - clean, level, self._words(caption if said else ""))

    def _index(self, number: int) -> int:
        if self.pictures.count is None:
            return number
        epoch, place = divmod(number, self.pictures.count)
        return int(_shuffled(self.pictures.count, self.seed, epoch)[place])

    def _words(self, caption: str) -> Int[Tensor, "words"]:
        if self.tokenizer is None:
            return torch.zeros(0, dtype=torch.long)
        padded = {"padding": "max_length", "max_length": self.tokenizer.model_max_length, "truncation": True}
        return self.tokenizer(caption, **padded, return_tensors="pt").input_ids[0]


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Int[Tensor, "count"]:
    return torch.randperm(count, generator=chance("epoch", seed, epoch))
