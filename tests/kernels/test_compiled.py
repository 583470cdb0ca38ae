"""Laws of the kernels as compiled for sm_90: they use its tensor cores, hardly spill, and add nothing atomically."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPILLED = {
    "forward": 8,
    "backward_keys": 160,
    "hopper forward": 128,
    "row_attention, 128 rows": 64,
    "hopper backward_keys": 160,
    "soft_assignment": 160,
    "log-linear forward": 64,
    "log-linear without picked means": 120,
    "log-linear backward_queries": 136,
    "log-linear keys of tokens": 56,
    "log-linear keys of nodes": 80,
    "log-linear shared keys": 104,
}  # bytes per thread; configurations that spill nothing were slower

WITHOUT_PRODUCTS = {
    "pool", "parts", "place", "allocate", "facility_location", "copy_rows", "gather_changed",
    "sum_gains", "pick_best", "cover",
}  # fmt: skip


@pytest.mark.slow
def test_kernels_use_the_tensor_cores_of_sm_90_hardly_spill_and_add_nothing_atomically():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sm90.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    facts = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(facts) == 71
    for fact in facts:
        products = fact["wgmma"] + (fact["size"] < 64) * fact["mma"]  # wgmma takes at least 64 rows
        assert products > 0 or fact["kernel"] in WITHOUT_PRODUCTS, fact
        assert fact["stack"] <= SPILLED.get(fact["kernel"], 0), fact
        assert fact["shared"] <= 227 * 1024, fact
        assert bool(fact["atomics"]) == (fact["kernel"] in ("place", "allocate")), fact  # these count
