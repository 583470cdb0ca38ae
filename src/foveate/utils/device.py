# pyright: basic
"""Choice of device and dtype, and versions of the software and hardware of a run."""

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import foveate

__all__ = ["choose_device", "choose_dtype", "dtype_name", "versions"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """The named device; "auto" takes a GPU if there is one.

    Raises:
        ValueError: If this machine has no such device.
    """
    mps = torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:1 or mps") from None
    missing = chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()
    if missing or (chosen.type == "mps" and not mps):
        raise ValueError(f"this machine has no {device}: use cpu or auto")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The named dtype; "auto" takes bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ValueError: If the name is unknown.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    """Versions of packages and Python, the operating system, CPU, GPU and, if known, the commit."""
    found = {"foveate": foveate.__version__, "commit": _commit()}
    for package in ("torch", "triton", "diffusers", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **found,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": f"{_processor()}, {torch.get_num_threads()} threads",
        "GPU": ", ".join(gpus) or "none",
    }


def _commit() -> str:
    root = Path(foveate.__file__).parents[2]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.check_output(command, text=True, cwd=root, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a repository of another user
        return "unknown"


def _processor() -> str:
    try:
        models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()
