"""Compile every kernel for sm_90 without a GPU and print facts about the binaries as JSON lines.

This runs as its own process, because the other tests run with TRITON_INTERPRET=1.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32

from foveate.kernels.block import block_attention as ops
from foveate.kernels.block import hopper_attention, hopper_backward, triton_attention
from foveate.kernels.log_linear import backward, forward, pooling, select_blocks
from foveate.kernels.merging import (
    coverage_drops,
    facility_location,
    pick_refreshed,
    region_matmul,
    region_update,
    soft_assignment,
)
from foveate.kernels.rows import copy_rows, row_attention

SHARED_MEMORY = 227 * 1024
USAGE = {"registers": "REG", "stack": "STACK"}
DTYPES = {"fp16": float16, "bf16": bfloat16}
POINTERS = {
    "*i32": "p_tiles p_steps p_work p_bounds p_at p_weight p_counts p_above p_list p_list1 p_list2 p_list3 p_list4 "
    "p_above_bounds p_readers p_own p_used p_tile",
    "*i64": "p_order p_place p_given p_picks",
    "*fp32": "p_lse p_dlse p_binary p_delta p_s p_logs p_sums p_dmk p_dmv",
    "*u8": "p_real",
}
KINDS = {name: kind for kind, names in POINTERS.items() for name in names.split()}
BLOCK_KERNELS = {
    "forward": (ops.FORWARD, 1),
    "backward_queries": (ops.BACKWARD_QUERIES, 2),
    "backward_keys": (ops.BACKWARD_KEYS, 2),
}


def compiled(kernel, constants, half, warps, registers=None, stages=None, **more_kinds):
    names = kernel.arg_names
    kinds = {name: KINDS.get(name, "*" + half if name.startswith("p_") else "i32") for name in names}
    kinds |= dict.fromkeys(("scale", "factor"), "fp32") | dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if name.startswith(("p_", "s_")) or name == "dim"}
    source_of = GluonASTSource if any("Layout" in kind for kind in more_kinds.values()) else ASTSource
    source = source_of(kernel, {name: (kinds | more_kinds)[name] for name in names}, constants, attributes)
    options = {"num_warps": warps, **({"maxnreg": registers} if registers else {})}
    options |= {"num_stages": stages} if stages else {}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def made_constant(kernel, sizes):
    """Sizes that Triton would compile as constants when they are 1, which `do_not_specialize` forbids."""
    return {param.name: 1 for param in kernel.params if param.name in sizes and not param.do_not_specialize}


def usage(cubin):
    """Registers of a thread, and bytes of its stack (spilled registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{kind}:(\d+)", text).group(1)) for name, kind in USAGE.items()}


def report(name, size, half, kernel, constants, warps, registers=None, stages=None, **more_kinds):
    """Compile a kernel and print facts about it, unless other kernels are named on the command line."""
    if sys.argv[1:] and name not in sys.argv[1:]:
        return
    result = compiled(kernel, constants, half, warps, registers, stages, **more_kinds)
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


for name, (configs, operands) in BLOCK_KERNELS.items():
    for dim, half in ((64, "fp16"), (128, "bf16"), (96, "bf16")):
        padded = triton.next_power_of_2(dim)
        config = ops.first_that_fits(configs, operands, 2 * padded, SHARED_MEMORY)
        constants = {"D": dim, "BD": padded, "BM": config.rows, "BN": config.step, "STAGES": config.stages}
        constants |= {"SCATTER": dim == 64} if name == "forward" else {}
        report(name, dim, half, getattr(triton_attention, name), constants, config.warps)


def report_gluon(kernel, dim, half, step, stages, kept, **constants):
    """Compile a Gluon kernel; descriptors in `kept` have blocks of 64 rows, kept by a warpgroup, others of a step."""
    kinds = {}
    for name in [name for name in kernel.arg_names if name.startswith("d_")]:
        vector = name in ("d_lse", "d_delta")
        block = [step] if vector else [64 if name in kept else step, dim]
        dtype = float32 if vector else DTYPES[half]
        layout = NVMMASharedLayout.get_default_for(block, dtype)
        kinds[name] = f"tensordesc<{'fp32' if vector else half}{block},{layout!r}>"
    constants |= {"D": dim, "BN": step, "STAGES": stages}
    report(f"hopper {kernel.__name__}", dim, half, kernel, constants, 4, **kinds)


for dim, half in ((64, "fp16"), (128, "bf16")):
    stages = hopper_attention.STAGES[dim], hopper_backward.STAGES[dim], hopper_backward.STAGES[dim]
    kernels = hopper_attention.forward, hopper_backward.backward_queries, hopper_backward.backward_keys
    kept = {"d_q"}, {"d_q", "d_g"}, {"d_k", "d_v"}
    steps = hopper_attention.STEP, hopper_backward.STEP, hopper_backward.STEP
    given = {"NUMBERED": False, "SCATTER": True, "share": 1}, {}, {}  # 1 is a constant to Triton
    for kernel, step, depth, tile, more in zip(kernels, steps, stages, kept, given, strict=True):
        report_gluon(kernel, dim, half, step, depth, tile, **more)
    report_gluon(hopper_attention.forward, dim, half, steps[0], stages[0], kept[0], NUMBERED=True, SCATTER=False)

for dim, half in ((64, "fp16"), (128, "bf16"), (96, "bf16")):
    padded = triton.next_power_of_2(dim)
    for configs in (row_attention.FEW, ops.FORWARD):
        config = ops.first_that_fits(configs, 1, 2 * padded, SHARED_MEMORY)
        constants = {"D": dim, "BD": padded, "BM": config.rows, "BN": config.step, "STAGES": config.stages}
        for window, name in ((False, f"row_attention, {config.rows} rows"), (True, f"windows of {config.rows} rows")):
            more = constants | {"WINDOW": window}
            report(name, dim, half, row_attention.attend_rows, more, config.warps, p_at="*i64")
    constants = {"HALF": dim // 2, "BH": padded // 2, "BM": copy_rows.ROWS, "ROTATE": True}
    report("copy_rows", dim, half, copy_rows.copy_tile, constants, copy_rows.WARPS, p_cos="*fp32", p_sin="*fp32")

for size, (channels, warps) in soft_assignment.CONFIGS.items():
    constants = {"GIVEN": False, "T": size, "BC": channels}
    report("soft_assignment", size, "bf16", soft_assignment._assign, constants, warps)
for size in (256, 1024):
    constants = {"T": size, "BC": facility_location.AT_ONCE // size}
    report("facility_location", size, "fp32", facility_location._pick, constants, facility_location.WARPS)
sums = dict.fromkeys(("p_before", "p_after", "p_low", "p_high", "p_drops"), "*fp32")
sums |= {"p_place": "*i32", "p_number": "*i32"}
for name, rows in (("d_items", coverage_drops.ITEMS), ("d_candidates", coverage_drops.CANDIDATES)):
    sums[name] = f"tensordesc<bf16[{rows}, {coverage_drops.CHANNELS}]>"
constants = {"BM": coverage_drops.CANDIDATES, "BN": coverage_drops.ITEMS, "BC": coverage_drops.CHANNELS}
for kernel, warps, stages in (
    (coverage_drops.gather_changed, 4, None),
    (coverage_drops.sum_drops, coverage_drops.WARPS, coverage_drops.STAGES),
):
    own = [{name: value for name, value in table.items() if name in kernel.arg_names} for table in (constants, sums)]
    report(kernel.__name__, coverage_drops.ITEMS, "bf16", kernel, own[0], warps, None, stages, **own[1])
state = dict.fromkeys(("p_similar", "p_covered", "p_parts", "p_others", "p_bonus", "p_gains"), "*fp32")
state |= dict.fromkeys(("p_block", "p_refreshed", "p_turn", "p_classes", "p_room"), "*i64")
state |= {"p_certain": "*i1", "p_row": "*i32", "rounding": "fp32", "tie": "fp32"}
limits = {"ROOM": True, "LARGEST": pick_refreshed.LARGEST}
constants = {"BR": 32, "BN": pick_refreshed.ITEMS, "BP": pick_refreshed.PARTS, **limits}
for kernel in (pick_refreshed.sum_gains, pick_refreshed.pick_best, pick_refreshed.cover):
    own = [{name: value for name, value in table.items() if name in kernel.arg_names} for table in (constants, state)]
    report(kernel.__name__, 32, "bf16", kernel, own[0], pick_refreshed.WARPS, **own[1])
for module, kernel in ((region_matmul, region_matmul._multiply), (region_update, region_update._update)):
    name = module.__name__.rpartition(".")[2]
    for rows, tokens, more in ((16, 64, {"p_order": None}), (64, 32, {}), (64, 64, {})):
        constants = {"M": rows, "T": tokens, "BC": module.CHANNELS} | more
        report(name, rows, "bf16", kernel, constants, module.WARPS)


def log_linear(dim, configs, **more):
    """Configuration, constants, warps and registers of a kernel of log-linear attention."""
    config = forward.config_for(configs, dim)
    same = {"ENRICHED": 2, "REWEIGHT": True, "EXCLUDE": False, "MASKED": False, "INT64": False, "B": 16}
    constants = same | {"D": dim, "BD": triton.next_power_of_2(dim), "STAGES": config.stages} | more
    return config, constants, config.warps, config.registers


for dim, half in ((64, "fp16"), (128, "bf16")):
    for kernel, configs in (
        (forward._forward, forward.FORWARD),
        (backward._backward_queries, backward.BACKWARD_QUERIES),
    ):
        config, constants, *rest = log_linear(dim, configs, LEVELS=2)
        constants |= {"M": config.rows, "BN": config.step, "BK": config.small // 16}
        constants |= {"SMALL_STAGES": forward.SMALL_STAGES, "EVEN": dim == 64, "EXTRA": dim == 128}
        report(f"log-linear {kernel.__name__[1:]}", dim, half, kernel, constants, *rest)
        if kernel is forward._forward:
            report("log-linear without picked means", dim, half, kernel, constants | {"EXCLUDE": True}, *rest)
    kernel, sums = backward._backward_keys, {"p_xk": "*fp32", "p_xv": "*fp32"}
    for name, configs in (("tokens", backward.BACKWARD_TOKENS), ("nodes", backward.BACKWARD_NODES)):
        kinds = {"NODES": name == "nodes", "FOLD": name == "tokens"}
        config, constants, *rest = log_linear(dim, configs, LISTED=True, **kinds)
        constants |= {"BT": 16, "BM": config.step}
        report(f"log-linear keys of {name}", 16, half, kernel, constants, *rest, **sums)
    config, constants, *rest = log_linear(dim, backward.BACKWARD_SHARED, LISTED=False, NODES=True, FOLD=False)
    constants |= {"BT": config.rows, "BM": config.step}
    report("log-linear shared keys", config.rows, half, kernel, constants, *rest, **sums)
    constants = {"LISTED": True, "FOLD": True, "ENRICHED": 2, "MASKED": False, "B": 16, "BT": 64, "D": dim, "BD": dim}
    constants["BR"] = backward.ADDED
    report("parts", dim, half, backward._add_parts, constants, 4, **sums)
    constants = {"K": 8, "E": backward.AT_ONCE, "WRITE": dim == 64}
    report("place", 8, half, backward._place, constants, 4, p_cells="*i32")
    report("allocate", 32, half, backward._allocate, {"BN": backward.ALLOCATED, "BR": 64}, 4, p_cells="*i32")
    constants = {"TOP": dim == 64, "B": 16, "K": 8, "D": dim, "BD": dim}
    at_once = select_blocks.AT_TOP if dim == 64 else select_blocks.CANDIDATES
    warps = at_once // select_blocks.CANDIDATES
    report("select", 16, half, select_blocks._select, constants | {"BN": at_once}, warps)
    constants = {"WEIGHTED": dim == 128, "UPPER": True, "SUMS": True, "B": 16, "D": dim, "BD": dim}
    report("pool", 16, half, pooling._pool, constants, pooling._pool_warps(16, dim))
