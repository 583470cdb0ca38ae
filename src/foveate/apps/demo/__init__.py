"""The built-in models, their scenes and texts, and the recogniser that judges images."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["LORAS", "MODELS", "BuiltIn", "find"]


def find(name: str) -> Path:
    """Path of a file or folder of the built-in models: see `foveate_models.find`.

    Raises:
        ValueError: If there is no such file, or foveate-models is not installed.
    """
    try:
        import foveate_models
    except ImportError:
        raise ValueError(
            "the built-in models are not installed: pip install 'foveate[models]' (in a clone: pip install -e models) "
            "or name another model"
        ) from None
    return foveate_models.find(name)


LORAS = {"built-in": "lora", "built-in-16": "lora-16"}
"""Folders of the built-in LoRAs by name, distilled for HilbertA with 4 and with 16 tiles."""


class BuiltIn(NamedTuple):
    """A built-in image or video model and its defaults.

    Attributes:
        name: Its folder, for `find`.
        sides: Default width and height of its images or frames in pixels, on a GPU and on a CPU.
        frames: Frames of a video; None if it generates images.
        guidance: Guidance scale; None is the pipeline's own.
        words: Known words that the other built-in models lack.
    """

    name: str
    sides: tuple[int, int]
    frames: int | None = None
    guidance: float | None = None
    words: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of the pipeline."""
        return find(self.name)


MODELS = {
    "": BuiltIn("pipeline", (256, 128)),
    "built-in-pixel": BuiltIn("pixel", (128, 64)),
    "built-in-video": BuiltIn("video", (96, 64), frames=17, guidance=3.0, words=("moves", "up", "down")),
}
"""The image and video models by their names for `--model`; the empty name is the default model."""
