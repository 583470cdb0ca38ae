"""Laws of the repository for `kernels` of Hugging Face: it is loaded beside the library, and computes the same."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from lab import hub_kernels

ROOT = Path(__file__).parents[2]
COMPARE = """
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from kernels import get_local_kernel

device, dtype = sys.argv[2], torch.bfloat16 if sys.argv[2] == "cuda" else torch.float32
sys.modules["foveate"] = sys.modules["jaxtyping"] = None  # it needs neither
kernel = get_local_kernel(Path(sys.argv[1]))
del sys.modules["foveate"], sys.modules["jaxtyping"]

from foveate.ops import dispatch, log_linear_attention
from foveate.ops.block_attention import block_attention

table = kernel.block_table([[0, 2], [1], [0, 1, 2, 3], []], kernel.block_starts(250))
loaded = import_module(f"{kernel.__name__}.ops.dispatch")
if find_spec("triton"):
    for name in ("block.block_attention", "log_linear.select_blocks", "log_linear.log_linear_attention"):
        assert import_module(f"{kernel.__name__}.kernels.{name}").BACKENDS


def results(attention, log_linear):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 250, 64, device=device, dtype=dtype).requires_grad_()
    out, lse = attention(q, k, v, table, return_lse=True)
    picked = log_linear(q, k, v, top_k=3)
    total = out.float().square().sum() + lse[lse.isfinite()].sum() + picked.out.float().square().sum()
    return [out, lse, *picked[:2], *picked.selection.lists, *torch.autograd.grad(total, (q, k, v))]


ours = results(block_attention, log_linear_attention)
theirs = results(kernel.block_attention, kernel.log_linear_attention)
assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
for op in ("block_attention", "log_linear_attention", "select_blocks"):
    names = [[b.name for b in x.backends(op, torch.device(device), dtype, 64)] for x in (dispatch, loaded)]
    assert names[0] == names[1], names
compiled = torch.compile(kernel.block_attention, backend="aot_eager", fullgraph=True)
assert torch.equal(results(compiled, kernel.log_linear_attention)[0], ours[0])
print("same")
"""


@pytest.mark.skipif(find_spec("kernels") is None, reason="needs the package kernels")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_loaded_from_the_folder_equals_the_library(device, tmp_path):
    hub_kernels.build(tmp_path / "repository")
    command = [sys.executable, "-c", COMPARE, tmp_path / "repository", device]
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout == "same\n", result.stderr


@pytest.mark.skipif(find_spec("kernels") is None, reason="needs the package kernels")
def test_the_metadata_names_what_the_folder_holds(tmp_path):
    from kernels import Metadata
    from kernels._rust import Digest, DigestAlgorithm

    hub_kernels.build(tmp_path / "repository")
    for backend in hub_kernels.BACKENDS:
        variant = tmp_path / "repository" / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.id.startswith(f"_foveate_{backend}_")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_the_source_needs_neither_the_library_nor_jaxtyping():
    files = hub_kernels.sources()
    assert {"ops/block_attention.py", "kernels/block/hopper_backward.py", "utils/cache.py"} <= set(files)
    for text in files.values():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        absolute = [
            getattr(node, "module", None) or node.names[0].name for node in nodes if not getattr(node, "level", 0)
        ]
        assert not {name.partition(".")[0] for name in absolute} & {"foveate", "jaxtyping"}
        assert not re.search(r'"foveate(::)?|torch.ops.foveate', text)
