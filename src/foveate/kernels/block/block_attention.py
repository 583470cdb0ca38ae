# pyright: basic, reportArgumentType=false
"""Attention over a block table on NVIDIA GPUs: custom ops around the Triton, Hopper and FlashAttention 4 kernels."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foveate.kernels.block import flash_attention, hopper_attention, hopper_backward, triton_attention
from foveate.kernels.block.schedule import Schedule, partition, schedule
from foveate.kernels.launch import (
    AMPERE,
    Launch,
    call,
    compute_capability,
    differentiable,
    empty_like,
    empty_lse,
    gpu_op,
    half_precision,
    launcher,
    multiprocessors,
    padded_size,
    recorded,
    row_contiguous,
    shared_memory,
)
from foveate.ops.block_table import BlockTable
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "block_attention"]

HOPPER, LARGEST_HEAD = 90, 256
GLUON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
DELTA_ROWS = 64  # rows of a program of `deltas`
_SCHEDULES: WeakTensorCache[Schedule] = WeakTensorCache()
_PARTITIONED: WeakTensorCache[Schedule] = WeakTensorCache()


class KernelConfig(NamedTuple):
    """Tile sizes and launch options of an attention kernel.

    Attributes:
        rows: Rows of a tile.
        step: Columns of a full step.
        warps: Warps of a program.
        stages: Pipeline stages of the loop over full steps.
    """

    rows: int
    step: int
    warps: int
    stages: int


# The fastest first; a launch uses the first configuration that fits into shared memory.
FORWARD = (
    KernelConfig(128, 128, 8, 3),
    KernelConfig(128, 64, 8, 3),
    KernelConfig(128, 64, 8, 2),
    KernelConfig(64, 64, 4, 2),
    KernelConfig(64, 32, 4, 2),
)
BACKWARD_QUERIES = (
    KernelConfig(64, 64, 4, 3),
    KernelConfig(64, 64, 4, 2),
    KernelConfig(64, 32, 8, 2),
    KernelConfig(32, 32, 4, 2),
)
BACKWARD_KEYS = KernelConfig(64, 64, 4, 2), KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 4, 2)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Triton kernels run: NVIDIA Ampere or newer, half precision, head_dim at most 256."""
    return (
        device.type == "cuda"
        and compute_capability(device.index or 0) >= AMPERE
        and half_precision(dtype)
        and head_dim <= LARGEST_HEAD
    )


def supports_hopper(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Gluon kernels run: a Hopper GPU, half precision, head_dim 64 or 128, Triton 3.6 or newer."""
    return (
        supports(device, dtype, head_dim)
        and compute_capability(device.index or 0) == HOPPER
        and head_dim in (64, 128)
        and GLUON
    )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: BlockTable,
    scale: float,
    with_lse: bool,
    scatter: Tensor | None = None,
    *,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Output and LSE of `foveate.ops.block_attention`. The LSE is always computed, at no cost."""
    if scale < 0:  # kernels take the running maximum of unscaled scores
        q, scale = -q, -scale
    return call(_forward, q, k, v, *table, scatter, scale, kernels)


BACKENDS = {
    name: (supported, partial(block_attention, kernels=name))
    for name, supported in (("triton", supports), ("flash", flash_attention.supports), ("hopper", supports_hopper))
}


@gpu_op("block_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scatter: Tensor | None,
    scale: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    table = BlockTable(query_starts, key_starts, offsets, keys)
    if kernels == "flash":
        out, lse = flash_attention.forward(q, k, v, table, scale)
        return (out if scatter is None else empty_like(out).index_copy_(2, scatter, out)), lse
    if kernels == "hopper" and hopper_attention.addressable(q, k, v):
        plan = _partitioned(q, k, table, hopper_attention.CUT)
        out, lse = (_attend if plan.whole else _attend.__wrapped__)(q, k, v, plan, scatter, scale)
        return out, lse
    out, lse = empty_like(q), empty_lse(q)
    config, plan = _planned(q, k, table, FORWARD, tile_operands=1)
    q, k, v = map(row_contiguous, (q, k, v))
    _launch_forward(q, k, v, out, lse, scatter, *plan[:3], scale, config)
    return out, lse


@torch.library.register_fake(_forward)
def _(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return empty_like(q), empty_lse(q)


@gpu_op("block_attention_backward")
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scatter: Tensor | None,
    scale: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if scatter is not None:
        out, grad_out = (x.index_select(2, scatter) for x in (out, grad_out))
    table = BlockTable(query_starts, key_starts, offsets, keys)
    q, k, v, out, grad_out = map(row_contiguous, (q, k, v, out, grad_out))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    if kernels == "flash" and flash_attention.differentiates(q.device):
        dq, dk, dv = flash_attention.backward(grad_out, grad_lse, q, k, v, out, lse, table, scale)
        return dq, dk, dv
    if kernels == "hopper" and hopper_attention.addressable(q, k, v, grad_out):
        plans = [_partitioned(q, k, table, hopper_backward.CUT, transposed=turn) for turn in (False, True)]
        recordable = all(plan.whole for plan in plans) and not q.shape[2] % hopper_backward.CUT["aligned"]
        differentiate = _differentiate_hopper if recordable else _differentiate_hopper.__wrapped__
        dq, dk, dv = differentiate(q, k, v, out, lse, grad_out, grad_lse, *plans, scale)
        return dq, dk, dv
    dq, dk, dv, delta = map(empty_like, (q, k, v, lse))
    _launch_deltas(out, grad_out, grad_lse, delta)
    config, plan = _planned(q, k, table, BACKWARD_QUERIES, tile_operands=2)
    _launch_queries(q, k, v, grad_out, dq, lse, delta, *plan[:3], scale, config)
    configs = BACKWARD_KEYS[q.shape[3] > 128 :]  # the first spills wide heads, and exceeds Blackwell's limits
    config, plan = _planned(q, k, table, configs, tile_operands=2, transposed=True)
    _launch_keys(q, k, v, grad_out, dk, dv, lse, delta, *plan[:3], scale, config)
    return dq, dk, dv


@torch.library.register_fake(_backward)
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.scale, ctx.kernels = inputs[8:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out = torch.zeros_like(ctx.saved_tensors[3]) if grad_out is None else grad_out
    return *call(_backward, grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.kernels), *7 * [None]


differentiable(_forward, _save, _differentiate)


def _partitioned(
    q: Tensor, k: Tensor, table: BlockTable, cut: dict[str, int], *, transposed: bool = False
) -> Schedule:
    """Cached schedule of a Hopper kernel with the work of each program; tiles are of keys if `transposed`."""
    samples, programs = q.shape[0] * q.shape[1], multiprocessors(q.device)
    size = q.shape[2], k.shape[2], samples, programs  # part of the key, so that the schedule checks them
    return _PARTITIONED.get(
        table, (*size, *cut.values(), transposed, q.device),
        lambda: partition(_schedule_of(q, k, table, cut, transposed=transposed), samples, programs),
    )  # fmt: skip


@recorded
def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Schedule, scatter: Tensor | None, scale: float) -> list[Tensor]:
    """Output and LSE, on Hopper."""
    out, lse = _filled([empty_like(q), empty_lse(q)], plan, 0.0, -math.inf)
    hopper_attention.launch(q, k, v, out, lse, plan, scale, scatter=scatter)
    return [out, lse]


@recorded
def _differentiate_hopper(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None,
    queries: Schedule, keys: Schedule, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v, on Hopper; `queries` and `keys` are the schedules of the two passes."""
    delta = empty_like(lse)
    [dq], (dk, dv) = _filled([empty_like(q)], queries, 0.0), _filled([empty_like(k), empty_like(v)], keys, 0.0, 0.0)
    _launch_deltas(out, grad_out, grad_lse, delta)
    inputs = q, k, v, grad_out, lse, delta
    hopper_backward.launch_queries(*inputs, dq, queries, scale)
    hopper_backward.launch_keys(*inputs, dk, dv, keys, scale)
    return [dq, dk, dv]


def _filled(tensors: list[Tensor], plan: Schedule, *values: float) -> list[Tensor]:
    """The tensors, filled with the values if kernels will not write all of them."""
    return tensors if plan.whole else [x.fill_(value) for x, value in zip(tensors, values, strict=True)]


def _schedule_of(q: Tensor, k: Tensor, table: BlockTable, cut: dict[str, int], *, transposed: bool) -> Schedule:
    """Cached schedule of a table for these queries and keys; `cut` are options of `schedule`."""

    def make() -> Schedule:
        table.check(q, k)
        return schedule(table.transpose() if transposed else table, **cut, device=q.device)

    return _SCHEDULES.get(table, (q.shape[2], k.shape[2], *cut.items(), transposed, q.device), make)


def _planned(
    q: Tensor, k: Tensor, table: BlockTable, configs: tuple[KernelConfig, ...], *, tile_operands: int,
    transposed: bool = False,
) -> tuple[KernelConfig, Schedule]:  # fmt: skip
    """Configuration of a Triton kernel that fits this device, and the schedule of the table for it.

    Args:
        q: Queries.
        k: Keys.
        table: Key blocks that each query block reads.
        configs: Configurations to choose from, the fastest first.
        tile_operands: Number of operands of the size of a tile that a program keeps in shared memory.
        transposed: Whether tiles are of keys and steps of queries, instead of the reverse.
    """
    row_bytes = padded_size(q.shape[3]) * q.element_size()
    config = first_that_fits(configs, tile_operands, row_bytes, shared_memory(q.device))
    cut = {"rows": config.rows, "step": config.step}
    return config, _schedule_of(q, k, table, cut, transposed=transposed)


@launcher
def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scatter: Tensor | None, tiles: Tensor, steps: Tensor,
    long: int, scale: float, config: KernelConfig,
) -> Launch:  # fmt: skip
    flat = lse, lse if scatter is None else scatter, tiles, steps, scale / math.log(2)
    return _pass(triton_attention.forward, (q, k, v, out), flat, long, config, SCATTER=scatter is not None)


@launcher
def _launch_queries(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, dq: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor,
    steps: Tensor, long: int, scale: float, config: KernelConfig,
) -> Launch:  # fmt: skip
    flat = lse, delta, tiles, steps, scale / math.log(2), scale
    return _pass(triton_attention.backward_queries, (q, k, v, grad_out, dq), flat, long, config)


@launcher
def _launch_keys(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, dk: Tensor, dv: Tensor, lse: Tensor, delta: Tensor,
    tiles: Tensor, steps: Tensor, long: int, scale: float, config: KernelConfig,
) -> Launch:  # fmt: skip
    flat = lse, delta, tiles, steps, scale / math.log(2), scale
    return _pass(triton_attention.backward_keys, (q, k, v, grad_out, dk, dv), flat, long, config)


def _pass(
    kernel: Any, strided: tuple[Tensor, ...], flat: tuple[Any, ...], long: int, config: KernelConfig, **constants: bool
) -> Launch:
    """Launch of a Triton kernel over a schedule.

    Args:
        kernel: The kernel.
        strided: Tensors [batch, heads, tokens, head_dim].
        flat: Contiguous tensors of numbers per query, tiles and steps of the schedule, and factors.
        long: Number of leading tiles that take much longer than the rest.
        config: Tile sizes and launch options.
        constants: Further constants of the kernel.
    """
    batch, heads, queries, head_dim = strided[0].shape
    tiles = len(flat[2])
    args = *strided, *flat, tiles, long, heads, queries, *(stride for x in strided for stride in x.stride()[:3])
    sizes = {"BM": config.rows, "BN": config.step, "STAGES": config.stages, "num_warps": config.warps}
    width = {"D": head_dim, "BD": padded_size(head_dim)}
    return Launch(kernel, (batch * heads * tiles,), args, width | sizes | constants)


@launcher
def _launch_deltas(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, delta: Tensor) -> Launch:
    """sum(out * grad_out) - grad_lse for every query: float32 [batch, heads, queries]."""
    batch, heads, queries, head_dim = out.shape
    args = out, grad_out, grad_lse, delta, heads, queries, *out.stride()[:3], *grad_out.stride()[:3]
    constants = {"D": head_dim, "BD": padded_size(head_dim), "BM": DELTA_ROWS}
    grid = batch * heads, triton.cdiv(queries, DELTA_ROWS)
    return Launch(triton_attention.deltas, grid, args, constants)


def first_that_fits(
    configs: tuple[KernelConfig, ...], tile_operands: int, row_bytes: int, memory: int
) -> KernelConfig:
    """First configuration whose operands fit into `memory` bytes of shared memory, or else the last.

    Args:
        configs: Configurations to choose from, the fastest first.
        tile_operands: Number of operands of `rows` rows; the two operands of a step are held once per stage.
        row_bytes: Bytes of one row of an operand.
        memory: Bytes of shared memory of a program.
    """
    for config in configs[:-1]:
        if (tile_operands * config.rows + 2 * config.stages * config.step) * row_bytes <= memory:
            return config
    return configs[-1]
