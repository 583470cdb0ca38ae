# pyright: basic, reportArgumentType=false
"""Attention over a block table on NVIDIA GPUs: custom ops around the Triton and Hopper kernels."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foveate.kernels.block import hopper_attention, hopper_backward, triton_attention
from foveate.kernels.block.schedule import Schedule, WorkPartition, partition, schedule
from foveate.kernels.launch import (
    empty_like,
    empty_lse,
    gpu_op,
    half_precision,
    multiprocessors,
    padded_size,
    row_contiguous,
    shared_memory,
)
from foveate.ops.block_table import BlockTable
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "block_attention"]

AMPERE, HOPPER, LARGEST_HEAD = 80, 90, 256
GLUON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
DELTA_ROWS = 64  # rows that one program of `deltas` computes
_SCHEDULES: WeakTensorCache[Schedule] = WeakTensorCache()
_PARTITIONS: WeakTensorCache[WorkPartition] = WeakTensorCache()


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


# The fastest first; a launch takes the first that fits into shared memory.
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
        and _compute_capability(device.index or 0) >= AMPERE
        and half_precision(dtype)
        and head_dim <= LARGEST_HEAD
    )


def supports_hopper(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Gluon kernels run: a Hopper GPU, half precision, head_dim 64 or 128, Triton 3.6 or newer."""
    return (
        supports(device, dtype, head_dim)
        and _compute_capability(device.index or 0) == HOPPER
        and head_dim in (64, 128)
        and GLUON
    )


@torch.compiler.assume_constant_result
def _compute_capability(index: int) -> int:
    """80 for sm_80. One number, because Dynamo of PyTorch 2.11 cannot compare constant tuples."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: BlockTable,
    scale: float,
    with_lse: bool,
    scatter: Tensor | None = None,
    *,
    hopper: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of `foveate.ops.block_attention`. The LSE is always computed: it costs nothing."""
    if scale < 0:  # kernels take the running maximum of unscaled scores
        q, scale = -q, -scale
    return _forward(q, k, v, *table, scatter, scale, hopper)


BACKENDS = {"triton": (supports, block_attention), "hopper": (supports_hopper, partial(block_attention, hopper=True))}


@gpu_op("foveate::block_attention")
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
    hopper: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = empty_like(q), empty_lse(q)
    table = BlockTable(query_starts, key_starts, offsets, keys)
    if hopper and hopper_attention.addressable(q, k, v):
        outputs, empty = (out, lse), (0.0, -math.inf)
        launch = partial(hopper_attention.launch, scatter=scatter)
        _on_hopper(launch, table, (q, k, v), outputs, empty, scale, hopper_attention.CUT)
        return out, lse
    forward = _Pass(q, k, table, FORWARD, tile_operands=1)
    q, k, v = map(row_contiguous, (q, k, v))
    place = lse if scatter is None else scatter
    forward(
        triton_attention.forward, (q, k, v, out), (lse, place), (scale / math.log(2),), SCATTER=scatter is not None
    )
    return out, lse


@_forward.register_fake
def _(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return empty_like(q), empty_lse(q)


@gpu_op("foveate::block_attention_backward")
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
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = map(empty_like, (q, k, v))
    if scatter is not None:
        out, grad_out = (x.index_select(2, scatter) for x in (out, grad_out))
    table = BlockTable(query_starts, key_starts, offsets, keys)
    q, k, v, out, grad_out = map(row_contiguous, (q, k, v, out, grad_out))
    delta = _deltas(out, grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse.contiguous())
    if hopper and hopper_attention.addressable(q, k, v, grad_out):
        inputs = q, k, v, grad_out, lse, delta
        _on_hopper(hopper_backward.launch_queries, table, inputs, (dq,), (0.0,), scale, hopper_backward.CUT)
        _on_hopper(hopper_backward.launch_keys, table, inputs, (dk, dv), (0.0, 0.0), scale, hopper_backward.CUT)
        return dq, dk, dv
    scales = scale / math.log(2), scale
    over_queries = _Pass(q, k, table, BACKWARD_QUERIES, tile_operands=2)
    over_queries(triton_attention.backward_queries, (q, k, v, grad_out, dq), (lse, delta), scales)
    configs = BACKWARD_KEYS[q.shape[3] > 128 :]  # the first spills registers with wide heads, and exceeds Blackwell
    over_keys = _Pass(q, k, table, configs, tile_operands=2, transposed=True)
    over_keys(triton_attention.backward_keys, (q, k, v, grad_out, dk, dv), (lse, delta), scales)
    return dq, dk, dv


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    return empty_like(q), empty_like(k), empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.scale, ctx.hopper = inputs[8:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out = torch.zeros_like(ctx.saved_tensors[3]) if grad_out is None else grad_out
    return *_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.hopper), *7 * [None]


_forward.register_autograd(_differentiate, setup_context=_save)


def _on_hopper(
    launch: Any,
    table: BlockTable,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    empty_values: tuple[float, ...],
    scale: float,
    cut: dict[str, int],
) -> None:
    """Launch a Hopper kernel.

    It skips tiles that have nothing to read, so `outputs` are filled with `empty_values` first where there are any.
    """
    q, k, *_ = inputs
    plan = _schedule_of(q, k, table, cut, transposed=launch is hopper_backward.launch_keys)
    samples, programs = q.shape[0] * q.shape[1], multiprocessors(q.device)
    work = _PARTITIONS.get([plan.tiles], (samples, programs), lambda: partition(plan, samples, programs))
    if len(work.items) < samples * len(plan.tiles):
        for x, value in zip(outputs, empty_values, strict=True):
            x.fill_(value)
    launch(*inputs, *outputs, plan, work, scale)


def _schedule_of(q: Tensor, k: Tensor, table: BlockTable, cut: dict[str, int], *, transposed: bool) -> Schedule:
    """The cached schedule of a table for these queries and keys, cut as `schedule` takes it."""
    table.check(q, k)
    return _SCHEDULES.get(
        table,
        (*cut.items(), transposed, q.device),
        lambda: schedule(table.transpose() if transposed else table, **cut, device=q.device),
    )


def _deltas(out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Tensor:
    """sum(out * grad_out) - grad_lse for every query: float32 [batch, heads, queries]."""
    batch, heads, queries, head_dim = out.shape
    delta = torch.empty_like(grad_lse)
    if delta.numel():
        triton_attention.deltas[(batch * heads, triton.cdiv(queries, DELTA_ROWS))](
            out, grad_out, grad_lse, delta, heads, queries, *out.stride()[:3], *grad_out.stride()[:3],
            D=head_dim, BD=padded_size(head_dim), BM=DELTA_ROWS,
        )  # fmt: skip
    return delta


class _Pass:
    """A launch of a Triton kernel over a table, with the configuration that fits this device.

    Args:
        q: Queries.
        k: Keys.
        table: Which key blocks each query block reads.
        configs: Configurations to choose from, the fastest first.
        tile_operands: Number of operands of the size of a tile that a program keeps in shared memory.
        transposed: Whether tiles are of keys and steps of queries, not the other way round.
    """

    def __init__(
        self, q: Tensor, k: Tensor, table: BlockTable, configs: tuple[KernelConfig, ...], *, tile_operands: int,
        transposed: bool = False,
    ):  # fmt: skip
        self.head_dim = padded_size(q.shape[3])
        row_bytes = self.head_dim * q.element_size()
        self.config = first_that_fits(configs, tile_operands, row_bytes, shared_memory(q.device))
        cut = {"rows": self.config.rows, "step": self.config.step}
        self.schedule = _schedule_of(q, k, table, cut, transposed=transposed)

    def __call__(
        self,
        kernel: Any,
        strided: tuple[Tensor, ...],
        flat: tuple[Tensor, ...],
        scales: tuple[float, ...],
        **constants: bool,
    ) -> None:
        """Launch with tensors [batch, heads, tokens, head_dim] and contiguous ones of numbers per query."""
        batch, heads, queries, head_dim = strided[0].shape
        tiles, steps, long = self.schedule
        if not (batch * heads * len(tiles)):
            return
        kernel[(batch * heads * len(tiles),)](
            *strided, *flat, tiles, steps, *scales, len(tiles), long, heads, queries,
            *(stride for x in strided for stride in x.stride()[:3]),
            D=head_dim, BD=self.head_dim, BM=self.config.rows, BN=self.config.step, STAGES=self.config.stages,
            num_warps=self.config.warps, **constants,
        )  # fmt: skip


def first_that_fits(
    configs: tuple[KernelConfig, ...], tile_operands: int, row_bytes: int, memory: int
) -> KernelConfig:
    """The first configuration whose operands fit into `memory` bytes of shared memory, or else the last.

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
