"""Compile every kernel for sm_90 without a GPU, and print as JSON what became of it.

A process of its own: here Triton must compile what it interprets in the other tests.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32

from foveate.kernels.block import block_attention as ops
from foveate.kernels.block import hopper_attention, hopper_backward, triton_attention
from foveate.kernels.log_linear import (
    hierarchical_pooling,
    log_linear_keys,
    log_linear_queries,
    selection,
    triton_log_linear,
    triton_log_linear_keys,
)
from foveate.kernels.merging import coverage_drops, facility_location, region_matmul, region_update, soft_assignment
from foveate.kernels.rows import row_attention

SHARED_MEMORY = 227 * 1024
USAGE = {"registers": "REG", "stack": "STACK"}
DTYPES = {"fp16": float16, "bf16": bfloat16}
KINDS = dict.fromkeys(("p_tiles", "p_steps", "p_work", "p_bounds", "p_at"), "*i32")
KINDS["p_order"] = "*i64"
KINDS |= dict.fromkeys(("p_lse", "p_dlse", "p_binary", "p_delta"), "*fp32") | dict.fromkeys(
    ("p_given", "p_picks"), "*i64"
)
KINDS |= dict.fromkeys(("p_s", "p_logs", "p_sums", "p_dmk", "p_dmv"), "*fp32") | {"p_real": "*u8", "p_weight": "*i32"}
KINDS |= dict.fromkeys(
    ("p_counts", "p_above", "p_list", "p_offsets", "p_readers", "p_own", "p_used", "p_first", "p_end", "p_tile"),
    "*i32",
)
KINDS |= {f"p_list{level}": "*i32" for level in range(1, 5)}
KERNELS = {
    "forward": (ops.FORWARD, 1),
    "backward_queries": (ops.BACKWARD_QUERIES, 2),
    "backward_keys": (ops.BACKWARD_KEYS, 2),
}


def compiled(kernel, constants, half, warps, registers=None, **more_kinds):
    names = kernel.arg_names
    kinds = {name: KINDS.get(name, "*" + half if name.startswith("p_") else "i32") for name in names}
    kinds |= dict.fromkeys(("scale", "factor"), "fp32") | dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if name.startswith(("p_", "s_")) or name == "dim"}
    source_of = GluonASTSource if any(kind.startswith("tensordesc") for kind in more_kinds.values()) else ASTSource
    source = source_of(kernel, {name: (kinds | more_kinds)[name] for name in names}, constants, attributes)
    options = {"num_warps": warps, **({"maxnreg": registers} if registers else {})}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def made_constant(kernel, sizes):
    """Of sizes that are 1, those that Triton compiles in as constants: all for which the kernel does not forbid it."""
    return {param.name: 1 for param in kernel.params if param.name in sizes and not param.do_not_specialize}


def usage(cubin):
    """Of a thread: its registers, and the bytes that do not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{kind}:(\d+)", text).group(1)) for name, kind in USAGE.items()}


def report(name, size, half, result):
    facts = {
        "kernel": name,
        "size": size,
        "dtype": half,
        "wgmma": result.asm["ptx"].count("wgmma.mma_async"),
        "mma": result.asm["ptx"].count("mma.sync"),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", result.asm["ptx"])),
        **usage(result.asm["cubin"]),
        "shared": result.metadata.shared,
    }
    print(json.dumps(facts))


for name, (shapes, operands) in KERNELS.items():
    for dim, half in ((64, "fp16"), (128, "bf16"), (96, "bf16")):
        padded = triton.next_power_of_2(dim)
        shape = ops.fitting(shapes, operands, 2 * padded, SHARED_MEMORY)
        constants = {"D": dim, "BD": padded, "BM": shape.rows, "BN": shape.step, "STAGES": shape.stages}
        report(name, dim, half, compiled(getattr(triton_attention, name), constants, half, shape.warps))


def compile_gluon(kernel, dim, half, step, stages, kept, **constants):
    """Of its descriptors, those named in `kept` are of the 64 rows that a warpgroup keeps, the others of a step."""
    kinds = {}
    for name in [name for name in kernel.arg_names if name.startswith("d_")]:
        vector = name in ("d_lse", "d_delta")
        block = [step] if vector else [64 if name in kept else step, dim]
        dtype = float32 if vector else DTYPES[half]
        layout = NVMMASharedLayout.get_default_for(block, dtype)
        kinds[name] = f"tensordesc<{'fp32' if vector else half}{block},{layout!r}>"
    constants |= {"D": dim, "BN": step, "STAGES": stages}
    return compiled(kernel, constants, half, 4, **kinds)


for dim, half in ((64, "fp16"), (128, "bf16")):
    stages = hopper_attention.STAGES[dim], hopper_backward.STAGES, hopper_backward.STAGES
    kernels = hopper_attention.forward, hopper_backward.backward_queries, hopper_backward.backward_keys
    kept = {"d_q"}, {"d_q", "d_g"}, {"d_k", "d_v"}
    steps = hopper_attention.STEP, hopper_backward.STEP, hopper_backward.STEP
    given = {"NUMBERED": False, "share": 1}, {}, {}  # 1 is a constant to Triton
    for kernel, step, depth, tile, more in zip(kernels, steps, stages, kept, given, strict=True):
        result = compile_gluon(kernel, dim, half, step, depth, tile, **more)
        report(f"hopper {kernel.__name__}", dim, half, result)
    numbered = compile_gluon(hopper_attention.forward, dim, half, steps[0], stages[0], kept[0], NUMBERED=True)
    report("hopper forward", dim, half, numbered)

for dim, half in ((64, "fp16"), (128, "bf16"), (96, "bf16")):
    padded = triton.next_power_of_2(dim)
    for shapes in (row_attention.FEW, ops.FORWARD):
        shape = ops.fitting(shapes, 1, 2 * padded, SHARED_MEMORY)
        constants = {"D": dim, "BD": padded, "BM": shape.rows, "BN": shape.step, "STAGES": shape.stages}
        result = compiled(row_attention.attend_rows, constants, half, shape.warps, p_at="*i64")
        report(f"row_attention, {shape.rows} rows", dim, half, result)

for size, (channels, warps) in soft_assignment.SHAPES.items():
    constants = {"GIVEN": False, "T": size, "BC": channels}
    report("soft_assignment", size, "bf16", compiled(soft_assignment._assign, constants, "bf16", warps))
for size in (256, 1024):
    constants = {"T": size, "BC": facility_location.AT_ONCE // size}
    result = compiled(facility_location._pick, constants, "fp32", facility_location.WARPS)
    report("facility_location", size, "fp32", result)
constants = {"BM": coverage_drops.CANDIDATES, "BN": coverage_drops.ITEMS, "BC": coverage_drops.CHANNELS}
constants |= {"STAGES": coverage_drops.STAGES}
sums = dict.fromkeys(("p_before", "p_after", "p_drops"), "*fp32") | {"p_changed": "*i32", "p_number": "*i32"}
for rows, sizes in ((128, ()), (1, ("items", "candidates"))):
    ones = made_constant(coverage_drops.sum_drops, sizes)
    result = compiled(coverage_drops.sum_drops, constants | ones, "bf16", coverage_drops.WARPS, **sums)
    report("coverage_drops", rows, "bf16", result)
for module, kernel in ((region_matmul, region_matmul._multiply), (region_update, region_update._update)):
    name = module.__name__.rpartition(".")[2]
    for rows, tokens, more in ((16, 64, {"p_order": None}), (64, 32, {}), (64, 64, {})):
        constants = {"M": rows, "T": tokens, "BC": module.CHANNELS} | more
        report(name, rows, "bf16", compiled(kernel, constants, "bf16", module.WARPS))


def log_linear(dim, shapes, **more):
    """Constants of a kernel of log-linear attention, its warps and its registers."""
    shape = log_linear_queries.shape_of(shapes, dim)
    same = {"ENRICHED": 2, "REWEIGHT": True, "EXCLUDE": False, "MASKED": False, "FAR": False, "B": 16}
    constants = same | {"D": dim, "BD": triton.next_power_of_2(dim), "STAGES": shape.stages} | more
    return shape, constants, shape.warps, shape.registers


for dim, half in ((64, "fp16"), (128, "bf16")):
    for name in ("forward", "backward_queries"):
        shape, constants, *rest = log_linear(dim, getattr(log_linear_queries, name.upper()), LEVELS=2)
        constants |= {"M": shape.rows, "BN": shape.step, "BK": shape.small // 16}
        constants |= {"SMALL_STAGES": shape.small_stages, "EVEN": dim == 64, "EXTRA": dim == 128}
        result = compiled(getattr(triton_log_linear, name), constants, half, *rest)
        report(f"log-linear {name}", dim, half, result)
    kernel, sums = triton_log_linear_keys.backward_keys, {"p_xk": "*fp32", "p_xv": "*fp32"}
    shape, constants, *rest = log_linear(dim, log_linear_keys.BACKWARD_KEYS, LISTED=True, NODES=False, FOLD=True)
    result = compiled(kernel, constants | {"BT": 16, "BM": shape.step}, half, *rest, **sums)
    report("log-linear keys of a block", 16, half, result)
    shape, constants, *rest = log_linear(dim, log_linear_keys.BACKWARD_SHARED, LISTED=False, NODES=True, FOLD=False)
    result = compiled(kernel, constants | {"BT": shape.rows, "BM": shape.step}, half, *rest, **sums)
    report("log-linear shared keys", shape.rows, half, result)
    constants = {"LISTED": True, "FOLD": True, "ENRICHED": 2, "MASKED": False, "B": 16, "BT": 64, "D": dim, "BD": dim}
    constants["BR"] = log_linear_keys.ADDED
    report("parts", dim, half, compiled(triton_log_linear_keys.add_parts, constants, half, 4, **sums))
    report("cut", 1024, half, compiled(triton_log_linear_keys.cut, {"BT": log_linear_keys.CUT}, half, 4))
    constants = {"TOP": dim == 64, "B": 16, "K": 8, "D": dim, "BD": dim}
    at_once = selection.AT_TOP if dim == 64 else selection.CANDIDATES
    warps = at_once // selection.CANDIDATES
    report("select", 16, half, compiled(selection._select, constants | {"BN": at_once}, half, warps))
    constants = {"K": 8, "E": selection.AT_ONCE, "WRITE": dim == 64}
    report("place", 8, half, compiled(selection._place, constants, half, 4, p_cells="*i32", p_rows="*i32"))
    constants = {"WEIGHTED": dim == 128, "UPPER": True, "SUMS": True, "B": 16, "D": dim, "BD": dim}
    report(
        "pool",
        16,
        half,
        compiled(hierarchical_pooling._pool, constants, half, hierarchical_pooling._pool_warps(16, dim)),
    )
