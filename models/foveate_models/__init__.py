"""The small models that come with Foveate: weights, their emoji, and the recogniser of their images."""

from pathlib import Path

__all__ = ["find"]

__version__ = "0.1.0"

_ROOT = Path(__file__).parent


def find(name: str) -> Path:
    """Path of a file or folder of the models.

    Folders: "pipeline" (images), "pixel" (images without an autoencoder), "video", "reader" (language), "lora" and
    "lora-16". Files: "atlas.png", "emoji.txt", "recogniser.safetensors", "words.txt".

    Raises:
        ValueError: If there is none of this name.

    Examples:
        >>> find("reader").name
        'reader'
    """
    path = _ROOT / name
    if not path.exists():
        names = ", ".join(sorted(path.name for path in _ROOT.iterdir() if not path.name.startswith("_")))
        raise ValueError(f"foveate-models has no {name!r}: choose one of {names}, or install it again")
    return path
