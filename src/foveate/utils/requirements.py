"""Versions of libraries whose inner parts Foveate uses."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["KNOWN", "check_version"]

KNOWN = {"diffusers": ("0.42", "0.43"), "transformers": ("5", "5.25")}
"""First version of each library that works, and first version after it that was not tried; as in pyproject.toml."""


def check_version(package: str) -> None:
    """Refuse another version of a library in `KNOWN` than those that were tried. Nothing happens without the library.

    Raises:
        ImportError: If it is installed in another version.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return  # its import tells so
    first, beyond = KNOWN[package]
    if not _numbers(first) <= _numbers(found) < _numbers(beyond):
        remedy = f'pip install "{package}>={first},<{beyond}"'
        raise ImportError(f"this version of foveate does not know {package} {found}: {remedy}")


def _numbers(text: str) -> list[int]:
    """Major and minor number."""
    return [int(part) for part in text.split(".")[:2]]
