"""Shared code of the studies: options, the device, and the folder of results."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foveate.apps.console import Commit
from foveate.utils.files import write_whole

__all__ = ["RESULTS", "SHEETS", "Batch", "Commit", "Pictures", "Prompts", "Size", "device_type", "save_result"]

RESULTS, SHEETS = Path("lab/results"), Path("docs/images")

Size = Annotated[int, typer.Option(help="Side of the images in pixels.")]
Prompts = Annotated[int, typer.Option(help="Held-out captions.")]
Batch = Annotated[int, typer.Option(help="Batch size.")]
Pictures = Annotated[str, typer.Option(help="Folder of the images; an existing run is resumed.")]


def device_type() -> str:
    """Device type for small models: the GPU if available."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def save_result(name: str, result: dict[str, Any], commit: str) -> Path:
    """Write a result to `RESULTS` as JSON, with the commit in its versions unless it is empty. Returns the path."""
    if commit:
        result["versions"]["commit"] = commit
    path = RESULTS / f"{name}.json"
    write_whole(path, json.dumps(result, indent=2).encode() + b"\n")
    return path
