"""Errors that a user can fix, as one line of text."""

import torch

__all__ = ["remedy"]

EXTRAS = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "accelerate": "diffusers,train",
    "peft": "diffusers,train",
    "imageio_ffmpeg": "diffusers,video",
    "gradio": "ui",
    "ray": "diffusers,serve",
    "fastapi": "transformers,serve",
}
"""Extras of foveate that install optional packages, by package."""


def remedy(error: Exception) -> str:
    """What is wrong and what helps, in one line; empty for errors that are not the user's to fix."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _allocation_failed(error):
        return "out of memory: use a smaller --size (or --top), --dtype bfloat16, or a device with more memory"
    if not isinstance(error, ValueError | ImportError | OSError):
        return ""
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return f"this needs {package}: pip install 'foveate[{EXTRAS[package]}]'"
    return (str(error).strip() or "something failed without a message").splitlines()[0]


def _allocation_failed(error: Exception) -> bool:
    known = "can't allocate memory", "not enough memory"  # messages of the CPU allocators
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)
