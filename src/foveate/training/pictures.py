# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportMissingImports=false
"""Training samples: images with captions, and latents with text embeddings, under noise.

Sample n depends on n and the seed only, so a resumed run gets the same samples as an uninterrupted one.
"""

import json
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from zlib import crc32

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from jaxtyping import Float, Int
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from foveate.pipelines.pixel import noise_scale

__all__ = [
    "FolderPictures",
    "HubPictures",
    "NoisyLatents",
    "NoisyPairs",
    "NoisyPicture",
    "NoisyPictures",
    "Pictures",
    "captioned",
    "fitted",
    "noise_shift",
    "pair_path",
    "seeded",
]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
LEVELS = 1000  # noise levels of a pixel model
CAPTIONS = ("text", "caption", "prompt", "label")  # columns of a data set; the first that exists is used
Sample = TypeVar("Sample", covariant=True)


def seeded(kind: str, seed: int, number: int) -> torch.Generator:
    """A random generator that depends on these three values only."""
    return torch.Generator().manual_seed(random.Random(f"{kind} {seed} {number}").getrandbits(63))


def fitted(picture: Image.Image, size: tuple[int, int]) -> Float[Tensor, "3 height width"]:
    """The image as pixels from -1 to 1, resized and centre-cropped to (height, width)."""
    return VaeImageProcessor(vae_scale_factor=1).preprocess(picture.convert("RGB"), *size, resize_mode="crop")[0]


# --- images --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Pictures(Protocol):
    """Numbered images with captions."""

    @property
    def count(self) -> int | None:
        """Number of images; None if unlimited."""
        ...

    @property
    def captioned(self) -> bool:
        """Whether the images have captions."""
        ...

    @property
    def checksum(self) -> str:
        """Checksum of this collection of images."""
        ...

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """An image of (height, width) pixels from -1 to 1, and its caption."""
        ...


class FolderPictures:
    """The images of a folder and its subfolders, sorted by name, with captions from .txt files beside them.

    Raises:
        ValueError: If there is no image, or only some of them have captions.
    """

    def __init__(self, folder: Path):
        self.files = _picture_files(folder, "**/*")
        without = _uncaptioned(self.files)
        self.count, self.captioned = len(self.files), len(without) < len(self.files)
        if without and self.captioned:
            raise ValueError(f"{without[0]} has no caption and others have: put one into {without[0].stem}.txt")
        names = [str(path.relative_to(folder)) for path in self.files]
        self.checksum = f"{crc32(json.dumps([names, self.captioned]).encode()):08x}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """The image, centre-cropped to (height, width), and its caption."""
        path = self.files[index]
        with Image.open(path) as file:
            return fitted(file, size), _caption(path) if self.captioned else ""


class HubPictures:
    """The images of a Hugging Face data set, with its captions or class names.

    Raises:
        ValueError: If the library `datasets` is missing, or the data set has no images.
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
            raise ValueError(f"{name} has no images among its columns {', '.join(kinds)}: name another data set")
        self.column, self.caption = pictures[0], next((column for column in CAPTIONS if column in kinds), None)
        self.count, self.captioned = len(self.data), self.caption is not None
        self.checksum = f"{name} {split} {self.count}"

    def picture(self, index: int, size: tuple[int, int]) -> tuple[Float[Tensor, "3 height width"], str]:
        """The image, centre-cropped to (height, width), and its caption."""
        row = self.data[index]
        return fitted(row[self.column], size), self._caption_of(row)

    def _caption_of(self, row: dict[str, Any]) -> str:
        if self.caption is None:
            return ""
        classes = getattr(self.data.features[self.caption], "names", None)
        return classes[row[self.caption]] if classes else str(row[self.caption])


def captioned(folder: Path, prompts: Sequence[str] | None) -> dict[Path, str]:
    """The images of a folder, sorted by name, each with its caption.

    Args:
        folder: The folder; subfolders are not searched.
        prompts: Captions in the order of the images; None takes them from the .txt files beside the images.

    Raises:
        ValueError: If there is no image, a caption is missing, or there are fewer prompts than images.
    """
    pictures = _picture_files(folder, "*")
    if prompts is None:
        if without := _uncaptioned(pictures):
            raise ValueError(f"{without[0].name} has no caption: put one into {without[0].stem}.txt, or pass prompts")
        return {path: _caption(path) for path in pictures}
    if len(prompts) < len(pictures):
        raise ValueError(f"{len(pictures)} images in {folder}, but {len(prompts)} prompts: give one for each")
    return dict(zip(pictures, prompts, strict=False))


def _picture_files(folder: Path, pattern: str) -> list[Path]:
    files = sorted(path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{folder} holds no images: name a folder of {', '.join(SUFFIXES)} files")
    return files


def _uncaptioned(pictures: Sequence[Path]) -> list[Path]:
    return [path for path in pictures if not path.with_suffix(".txt").is_file()]


def _caption(picture: Path) -> str:
    return picture.with_suffix(".txt").read_text().strip()


# --- samples under noise ---------------------------------------------------------------------------------------------


class Epochs(Dataset[Sample]):
    """Endless samples: every epoch has each of `count` items once, in a new order.

    Attributes:
        count: Number of items; None if unlimited, then sample n is item n.
        seed: Seed of the order and of the noise.
    """

    count: int | None
    seed: int

    def item(self, number: int) -> int:
        """Index of the item for sample `number`."""
        if self.count is None:
            return number
        epoch, place = divmod(number, self.count)
        return int(_shuffled(self.count, self.seed, epoch)[place])


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Int[Tensor, "count"]:
    return torch.randperm(count, generator=seeded("epoch", seed, epoch))


class NoisyLatents(NamedTuple):
    """Latents under noise with the embeddings of their captions: one sample, or a batch.

    Attributes:
        latents: (1 - level) latents + level noise.
        level: Noise level from 0 (clean) to 1 (noise).
        text: Embeddings by the pipeline's name for them.
    """

    latents: Float[Tensor, "..."]
    level: Float[Tensor, "*batch"]
    text: dict[str, Tensor]


def noise_shift(scheduler: Any, tokens: int) -> float:
    """Shift of the logit of a flow-matching scheduler's noise levels for this number of image tokens."""
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return math.log(config.get("shift") or config.flow_shift)
    names = "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
    return calculate_shift(tokens, *(config[name] for name in names))


class NoisyPairs(Epochs[NoisyLatents]):
    """Pairs of latents and text embeddings from `make_pairs`, under random noise.

    Args:
        folder: Folder of the pairs.
        prompts: Their captions.
        seed: Seed of the order and of the noise.
        shift: Shift of the noise level's logit; at 0 levels are uniform, positive values add noise.
    """

    def __init__(self, folder: Path, prompts: Sequence[str], seed: int, shift: float = 0.0):
        self.folder, self.count, self.seed, self.shift = folder, len(prompts), seed, shift
        self.checksum = f"{crc32(json.dumps(list(prompts)).encode()):08x}"

    def __getitem__(self, number: int) -> NoisyLatents:
        pair, generator = load_file(pair_path(self.folder, self.item(number))), seeded("sample", self.seed, number)
        level = torch.sigmoid(torch.logit(torch.rand((), generator=generator)) + self.shift)
        clean = pair.pop("latents").float()
        latents = (1 - level) * clean + level * torch.randn(clean.shape, generator=generator)
        return NoisyLatents(latents, level, pair)


def pair_path(folder: Path, index: int) -> Path:
    """The file of a pair."""
    return folder / f"{index:06}.safetensors"


class NoisyPicture(NamedTuple):
    """An image under noise, or a batch of them.

    Attributes:
        pixels: (1 - level) image + level scale noise.
        velocity: Target of the model, scale noise - image.
        level: Noise level from 0 (image) to 1 (noise).
        words: Token ids of the caption; empty without captions.
    """

    pixels: Float[Tensor, "*batch 3 height width"]
    velocity: Float[Tensor, "*batch 3 height width"]
    level: Float[Tensor, "*batch"]
    words: Int[Tensor, "*batch words"]


class NoisyPictures(Epochs[NoisyPicture]):
    """Images of one size under random noise.

    Args:
        pictures: The images.
        size: (height, width) in pixels.
        seed: Seed of the order, the noise and the dropped captions.
        tokenizer: Tokenizer of the captions; None if the model takes none.
        uncaptioned: Fraction of the samples with an empty caption.
    """

    def __init__(
        self, pictures: Pictures, size: tuple[int, int], seed: int, tokenizer: Any = None, uncaptioned: float = 0.0
    ):
        self.pictures, self.count, self.size, self.seed = pictures, pictures.count, size, seed
        self.tokenizer, self.uncaptioned = tokenizer, uncaptioned

    def __getitem__(self, number: int) -> NoisyPicture:
        clean, caption = self.pictures.picture(self.item(number), self.size)
        generator = seeded("picture", self.seed, number)
        level = torch.randint(1, LEVELS + 1, (), generator=generator) / LEVELS
        noise = noise_scale(*self.size) * torch.randn(clean.shape, generator=generator)
        if torch.rand((), generator=generator) < self.uncaptioned:
            caption = ""
        return NoisyPicture((1 - level) * clean + level * noise, noise - clean, level, self._words(caption))

    def _words(self, caption: str) -> Int[Tensor, "words"]:
        if self.tokenizer is None:
            return torch.zeros(0, dtype=torch.long)
        padded = {"padding": "max_length", "max_length": self.tokenizer.model_max_length, "truncation": True}
        return self.tokenizer(caption, **padded, return_tensors="pt").input_ids[0]
