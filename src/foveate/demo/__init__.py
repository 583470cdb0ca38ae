"""The model that Foveate brings along, how it was made, and how its pictures are judged."""

from pathlib import Path

__all__ = ["DATA", "PIPELINE"]

DATA = Path(__file__).parent / "data"
PIPELINE = DATA / "pipeline"
