"""Facts about the built-in models, read from their files."""

import json
from math import prod
from pathlib import Path

from safetensors import safe_open

from foveate.apps.demo import LORAS, find
from foveate.apps.demo.atlas import OBJECT_NAMES
from foveate.apps.demo.scenes import BACKGROUNDS, LAYOUTS
from foveate.apps.demo.text import WORDS
from foveate.pipelines.lora import find_lora, read_lora

__all__ = ["model_info", "pixel_model_info", "reader_info", "video_model_info"]


def model_info() -> dict[str, str]:
    """Size, training recipe, vocabulary and licences of the image model, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    return {
        "folder": str(find("pipeline")),
        **_parts_and_training(find("pipeline"), find("recipe.json"), "images of {} px"),
        "geometry": "4 px a token: 128 px are 1,024 image tokens, 256 px are 4,096, 512 px are 16,384",
        "LoRAs": "\n".join(_about_lora(name, find(folder)) for name, folder in LORAS.items()),
        "objects": f"{len(OBJECT_NAMES)}: {', '.join(OBJECT_NAMES)}",
        "backgrounds": ", ".join(BACKGROUNDS),
        "sentences": "\n".join(layout.sentence.format("A", "B", "C") for layout in LAYOUTS)
        + "\n... on a COLOUR background",
        "words": f"{len(WORDS)}; other words are spelled letter by letter",
        "licence": "weights and code: Apache-2.0. The emoji of the training images are Noto Color Emoji, "
        "SIL Open Font License 1.1 (OFL.txt beside them)",
    }


def pixel_model_info() -> dict[str, str]:
    """Size, training and quality of the pixel model, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    (weights,) = _weights(find("pixel/transformer"))
    recipe = json.loads(find("pixel/recipe.json").read_text())
    return {
        "folder": f"{find('pixel')}: --model built-in-pixel",
        "size": _megabytes(find("pixel")),
        "model": f"{_parameters(weights) / 1e6:.2f} M parameters; a token is a pixel, and attention is log-linear",
        "trained": f"{recipe['minutes']} minutes on {recipe['devices']}: {recipe['pictures']:,} images, "
        f"{recipe['options']}",
        "objects generated": f"{recipe['objects at 128 px']:.1%} of the objects in held-out captions at 128 px",
        "licence": "as above",
    }


def video_model_info() -> dict[str, str]:
    """Size, training and known sentences of the video model, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    return {
        "folder": f"{find('video')}: --model built-in-video",
        **_parts_and_training(find("video"), find("video/recipe.json"), "videos of (frames, px) {}"),
        "geometry": "4 px of two frames a token: 17 frames of 96 px are 5,184 tokens",
        "sentences": "A moves up\nA moves to the left below B\n... on a COLOUR background",
        "licence": "as above",
    }


def reader_info() -> dict[str, str]:
    """Size, training and accuracy of the reader, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    (weights,) = _weights(find("reader"))
    recipe = json.loads(find("reader/recipe.json").read_text())
    config = json.loads(find("reader/config.json").read_text())
    answered = (f"{kind}: {part:.0%}" for kind, part in recipe["accuracy"].items())
    return {
        "folder": str(find("reader")),
        "size": _megabytes(find("reader")),
        "model": f"{_parameters(weights) / 1e6:.2f} M parameters, {config['num_hidden_layers']} "
        f"layers, context of {config['max_position_embeddings']} tokens, one a word",
        "trained": f"{recipe['minutes']} minutes on {recipe['devices']}: {recipe['steps']:,} of "
        f"{recipe['planned steps']:,} planned steps, seed {recipe['seed']}",
        "answers": "\n".join(answered),
        "licence": "Apache-2.0",
    }


def _parts_and_training(folder: Path, recipe: Path, trained_on: str) -> dict[str, str]:
    """Size, parts and training of a pipeline, as text by name.

    Args:
        folder: Folder of the pipeline.
        recipe: File with the stages of its training.
        trained_on: Training data of a stage, with {} for its sizes: "images of {} px".
    """
    runs = [json.loads(recipe.read_text())]
    while before := runs[0].get("before"):
        runs.insert(0, before)
    stages = [stage for run in runs for stage in run["stages"]]
    return {
        "size": _megabytes(folder),
        **{path.parent.name: f"{_parameters(path) / 1e6:.2f} M parameters" for path in _weights(folder)},
        "trained": ", then ".join(f"{run['minutes']:.0f} minutes on {run['devices']}" for run in runs),
        "recipe": "\n".join(
            f"{s['name']}: {s['images']:,} {trained_on.format(' and '.join(s['batches']))}" for s in stages
        ),
    }


def _weights(folder: Path) -> list[Path]:
    if not (files := sorted(folder.rglob("*.safetensors"))):
        raise ValueError(f"{folder} holds no weights: install foveate-models again")
    return files


def _about_lora(name: str, folder: Path) -> str:
    """Method, image size and file size of a LoRA."""
    distilled = read_lora(find_lora(str(folder)))
    if distilled is None or distilled.size is None:
        raise ValueError(f"{folder} is damaged: install foveate-models again")
    return f"--lora {name}: {distilled.method.title} at {distilled.size[0]} px, {_megabytes(folder)}"


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.1f} MB"


def _parameters(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
