"""The built-in models as data, the scenes and texts they know, and the recogniser that judges pictures."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["DATA", "LORAS", "MODELS", "PIPELINE", "PIXEL", "READER", "VIDEO", "BuiltIn"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
"""Folder of the model that draws, for `FluxPipeline.from_pretrained`."""
LORAS = {"built-in": DATA / "lora", "built-in-16": DATA / "lora-16"}
"""Folders of its LoRAs by name, distilled for HilbertA with 4 and with 16 tiles, for `load_lora_weights`."""
PIXEL = DATA / "pixel"
"""Folder of the model that draws pixels, for `PixelPipeline.from_pretrained`."""
VIDEO = DATA / "video"
"""Folder of the model that draws videos, for `WanPipeline.from_pretrained`."""


class BuiltIn(NamedTuple):
    """A model that draws, and what it draws unless told otherwise.

    Attributes:
        folder: Folder of the pipeline.
        sides: Default width and height of its pictures or frames in pixels, on a GPU and on a CPU.
        frames: Frames of a video; None if it draws pictures.
        guidance: Guidance scale; None is the pipeline's own.
        words: Words in its captions that those of the other built-in models do not have.
    """

    folder: Path
    sides: tuple[int, int]
    frames: int | None = None
    guidance: float | None = None
    words: tuple[str, ...] = ()


MODELS = {
    "": BuiltIn(PIPELINE, (256, 128)),
    "built-in-pixel": BuiltIn(PIXEL, (128, 64)),
    "built-in-video": BuiltIn(VIDEO, (96, 64), frames=17, guidance=3.0, words=("moves", "up", "down")),
}
"""The models that draw, by their names for `--model`; the empty name is the default model."""
READER = DATA / "reader"
"""Folder of the model that reads, for `AutoModelForCausalLM` and `AutoTokenizer`."""
