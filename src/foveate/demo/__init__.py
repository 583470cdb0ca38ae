"""The built-in models as data, the scenes and texts they know, and the recogniser that judges pictures."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["DATA", "LORAS", "MODELS", "PIPELINE", "PIXEL", "READER", "BuiltIn"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
"""Folder of the model that draws, for `FluxPipeline.from_pretrained`."""
LORAS = {"built-in": DATA / "lora", "built-in-16": DATA / "lora-16"}
"""Folders of its LoRAs by name, distilled for HilbertA with 4 and with 16 tiles, for `load_lora_weights`."""
PIXEL = DATA / "pixel"
"""Folder of the model that draws pixels, for `PixelPipeline.from_pretrained`."""


class BuiltIn(NamedTuple):
    """A model that draws, and what it draws unless told otherwise; None is the pipeline's own.

    Attributes:
        folder: Folder of the pipeline.
        guidance: Guidance scale.
    """

    folder: Path
    guidance: float | None = None


MODELS = {"": BuiltIn(PIPELINE), "built-in-pixel": BuiltIn(PIXEL, guidance=3.0)}
"""The models that draw by name; no name is the first."""
READER = DATA / "reader"
"""Folder of the model that reads, for `AutoModelForCausalLM` and `AutoTokenizer`."""
