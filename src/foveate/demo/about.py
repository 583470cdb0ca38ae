"""Facts about the built-in models, read from their files."""

import json
from math import prod
from pathlib import Path

from safetensors import safe_open

from foveate.demo import DATA, PIPELINE, READER
from foveate.demo.atlas import NAMES
from foveate.demo.scenes import BACKGROUNDS, LAYOUTS
from foveate.demo.text import WORDS

__all__ = ["facts", "reader_facts"]


def facts() -> dict[str, str]:
    """Size, training recipe, vocabulary and licences of the model that draws, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    files = sorted(PIPELINE.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"{PIPELINE} holds no weights: install foveate again")
    recipe = json.loads((DATA / "recipe.json").read_text())
    parts = {path.parent.name: f"{_parameters(path) / 1e6:.2f} M parameters" for path in files}
    size = sum(path.stat().st_size for path in PIPELINE.rglob("*") if path.is_file())
    runs = [recipe]
    while before := runs[0].get("before"):
        runs.insert(0, before)
    stages = (
        f"{s['name']}: {s['images']:,} pictures of {' and '.join(s['batches'])} px"
        for run in runs
        for s in run["stages"]
    )
    return {
        "folder": str(PIPELINE),
        "size": f"{size / 1e6:.1f} MB",
        **parts,
        "geometry": "4 px a token: 128 px are 1,024 image tokens, 256 px are 4,096, 512 px are 16,384",
        "trained": ", then ".join(f"{run['minutes']:.0f} minutes on {run['devices']}" for run in runs),
        "recipe": "\n".join(stages),
        "objects": f"{len(NAMES)}: {', '.join(NAMES)}",
        "backgrounds": ", ".join(BACKGROUNDS),
        "sentences": "\n".join(layout.sentence.format("A", "B", "C") for layout in LAYOUTS)
        + "\n... on a COLOUR background",
        "words": f"{len(WORDS)}; other words are spelled letter by letter",
        "licence": "weights and code: Apache-2.0. The emoji of the training pictures are Noto Color Emoji, "
        "SIL Open Font License 1.1 (OFL.txt beside them)",
    }


def reader_facts() -> dict[str, str]:
    """Size, training and accuracy of the model that reads, as text by name.

    Raises:
        ValueError: If the files of the model are missing.
    """
    if not (READER / "model.safetensors").exists():
        raise ValueError(f"{READER} holds no weights: install foveate again")
    recipe = json.loads((READER / "recipe.json").read_text())
    config = json.loads((READER / "config.json").read_text())
    size = sum(path.stat().st_size for path in READER.iterdir())
    answered = (f"{kind}: {part:.0%}" for kind, part in recipe["accuracy"].items())
    return {
        "folder": str(READER),
        "size": f"{size / 1e6:.1f} MB",
        "model": f"{_parameters(READER / 'model.safetensors') / 1e6:.2f} M parameters, {config['num_hidden_layers']} "
        f"layers, context of {config['max_position_embeddings']} tokens of a word each",
        "trained": f"{recipe['minutes']} minutes on {recipe['devices']}: {recipe['steps']:,} of "
        f"{recipe['planned steps']:,} planned steps, seed {recipe['seed']}",
        "answers": "\n".join(answered),
        "licence": "Apache-2.0",
    }


def _parameters(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
