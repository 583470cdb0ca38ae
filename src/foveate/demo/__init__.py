"""The built-in models as data, the scenes and texts they know, and the recogniser that judges pictures."""

from pathlib import Path

__all__ = ["DATA", "LORAS", "MODELS", "PIPELINE", "PIXEL", "READER"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
"""Folder of the model that draws, for `FluxPipeline.from_pretrained`."""
LORAS = {"built-in": DATA / "lora", "built-in-16": DATA / "lora-16"}
"""Folders of its LoRAs by name, distilled for HilbertA with 4 and with 16 tiles, for `load_lora_weights`."""
PIXEL = DATA / "pixel"
"""Folder of the model that draws pixels, for `PixelPipeline.from_pretrained`."""
MODELS = {"": PIPELINE, "built-in-pixel": PIXEL}
"""Folder of each model that draws, by its name for `--model`; the empty name is the default model."""
READER = DATA / "reader"
"""Folder of the model that reads, for `AutoModelForCausalLM` and `AutoTokenizer`."""
