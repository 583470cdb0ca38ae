"""The models that Foveate brings along, how they were made, and how pictures are judged."""

from pathlib import Path

__all__ = ["DATA", "LORA", "PIPELINE", "READER"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
"""Draws pictures: what `FluxPipeline.from_pretrained` loads."""
LORA = DATA / "lora"
"""Distilled for HilbertA with 4 tiles: what `load_lora_weights` puts into that pipeline."""
READER = DATA / "reader"
"""Answers questions about texts: what `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer` load."""
