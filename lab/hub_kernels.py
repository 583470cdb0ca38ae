"""Builds the repository from which `kernels` of Hugging Face loads block attention and log-linear attention.

python -m lab.hub_kernels out/kernels     # then: kernels.get_local_kernel(Path("out/kernels"))

The repository has the layout of a kernel that needs no compiler: `torch-ext/` is the source for `kernel-builder`, and
`build/torch-cpu` and `build/torch-cuda` are what is loaded. They hold copies of files of `src/foveate` that differ in
three things: imports are relative, because a kernel is loaded from any path and several versions may be loaded at
once; ops are in a namespace of their own, for the same reason; and signatures do not need jaxtyping.
"""

import ast
import json
import re
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import foveate

SOURCE = Path(foveate.__file__).parent
NAME, VERSION = "foveate", 1
BACKENDS = "cpu", "cuda"
REGISTERED = re.compile(r'^dispatch\.register_kernels\("(\w+)", "(\w+)"\)', re.MULTILINE)
"""An op and the package of its kernels, which `ops.dispatch` imports on a GPU."""

INIT = '''"""Attention over a block table, and log-linear attention: PyTorch on any device, kernels on NVIDIA GPUs."""

from .ops.block_attention import block_attention
from .ops.block_table import BlockTable, block_starts, block_table
from .ops.hierarchical_pooling import Selection, select_blocks
from .ops.log_linear_attention import LogLinearOutput, log_linear_attention

__all__ = [
    "BlockTable",
    "LogLinearOutput",
    "Selection",
    "block_attention",
    "block_starts",
    "block_table",
    "log_linear_attention",
    "select_blocks",
]
'''
SHAPES = '''"""Shapes in signatures, for the reader only: ``Float[Tensor, "batch tokens"]`` is ``Tensor``."""


class Bool:
    """A tensor of a dtype and a shape."""

    def __class_getitem__(cls, item):
        return item[0]


Float = Int = Bool
'''
OPS = '''"""Namespace of the ops of this build."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name):
    """Name of an op with its namespace."""
    return f"{id}::{{op_name}}"
'''
BUILD = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = {json.dumps(BACKENDS)}

[torch-noarch]
"""
README = f"""---
license: apache-2.0
tags:
- kernels
---

# {NAME}

Attention over a block table, and log-linear attention, from Foveate: kernels in Triton and Gluon for NVIDIA GPUs, and
PyTorch for everything else.

```python
import torch
from kernels import get_kernel

kernel = get_kernel("USER/{NAME}", version={VERSION}, trust_remote_code=True)
q, k, v = torch.randn(3, 1, 24, 4096, 128, device="cuda", dtype=torch.bfloat16)
starts = kernel.block_starts(4096)  # 64 blocks of 64 tokens
local = kernel.block_table([range(max(0, i - 4), min(64, i + 5)) for i in range(64)], starts)
out = kernel.block_attention(q, k, v, local)
out, lse, selection = kernel.log_linear_attention(q, k, v, top_k=16)
```
"""


def sources() -> dict[str, str]:
    """Files of the package, and their text, without the module of the namespace."""
    files = {"__init__.py": INIT, "_shapes.py": SHAPES}
    pending = [f"{NAME}.{module}" for module in re.findall(r"from \.(\S+) import", INIT)]
    while pending:
        module = pending.pop()
        if module != NAME and (path := _file(module)) and (name := path.relative_to(SOURCE).as_posix()) not in files:
            text = path.read_text()
            files[name] = relocated(text, "." * len(path.relative_to(SOURCE).parts))
            pending += [module.rpartition(".")[0], *_imports(text)]
            pending += [f"{NAME}.kernels.{package}.{op}" for op, package in REGISTERED.findall(text)]
    return dict(sorted(files.items()))


def relocated(text: str, root: str) -> str:
    """The text of a file with relative imports, its own namespace of ops and plain annotations.

    Args:
        text: The text.
        root: The package, seen from the file: one dot for each level.
    """
    text = re.sub(rf"^( *)from {NAME}\.(\S+) import", rf"\1from {root}\2 import", text, flags=re.MULTILINE)
    text = text.replace("from jaxtyping import", f"from {root}_shapes import")
    own = re.sub(rf'"{NAME}::(\w+)"', r'add_op_namespace_prefix("\1")', text)
    own = own.replace(f'Library("{NAME}"', "Library(ops.name").replace(f"torch.ops.{NAME}", "ops")
    if own != text:
        own = own.replace("\nimport torch\n", f"\nimport torch\nfrom {root}_ops import add_op_namespace_prefix, ops\n")
    return own


def _file(module: str) -> Path | None:
    """The file of a module of Foveate; None for a function or class."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if found.exists() else None


def _imports(text: str) -> list[str]:
    """Names that a file imports from Foveate: modules, and what is in modules."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    inner = [node for node in found if (node.module or "").startswith(f"{NAME}.")]
    return [name for node in inner for name in (f"{node.module}", *(f"{node.module}.{x.name}" for x in node.names))]


def build(folder: Path) -> None:
    """Write the repository.

    Raises:
        FileExistsError: If there is such a folder.
    """
    folder.mkdir(parents=True)
    files = sources()
    version = sha256("".join(files.values()).encode()).hexdigest()[:10]
    _write(folder, {"build.toml": BUILD, "README.md": README})
    _write(folder / "torch-ext" / NAME, files)
    for backend in BACKENDS:
        name = f"_{NAME}_{backend}_{version}"
        built = files | {"_ops.py": OPS.format(id=name)}
        hashes = {path: b64encode(sha256(text.encode()).digest()).decode() for path, text in built.items()}
        metadata = {
            "name": NAME,
            "id": name,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": hashes},
        }
        _write(folder / "build" / f"torch-{backend}", built | {"metadata.json": json.dumps(metadata, indent=2) + "\n"})


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
