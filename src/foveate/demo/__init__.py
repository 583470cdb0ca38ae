"""The built-in models as data, the scenes and texts they know, and the recogniser that judges pictures."""

from pathlib import Path

__all__ = ["DATA", "LORA", "PIPELINE", "READER"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
"""Folder of the model that draws, for `FluxPipeline.from_pretrained`."""
LORA = DATA / "lora"
"""Folder of its LoRA, distilled for HilbertA with 4 tiles, for `load_lora_weights`."""
READER = DATA / "reader"
"""Folder of the model that reads, for `AutoModelForCausalLM` and `AutoTokenizer`."""
