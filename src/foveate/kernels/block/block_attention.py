# pyright: basic, reportArgumentType=false
"""Attention over a block table on NVIDIA GPUs: custom ops around the Triton kernels."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foveate.kernels.block import hopper_attention, hopper_backward, triton_attention
from foveate.kernels.block.schedule import Schedule, Shares, schedule, shares
from foveate.kernels.gpu_op import gpu_op
from foveate.ops.block_table import BlockTable
from foveate.utils.cache import WeakTensorCache

__all__ = ["BACKENDS", "block_attention"]

AMPERE, HOPPER, LARGEST_HEAD = 80, 90, 256
GLUON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
SMALLEST_DOT, DELTA_ROWS = 16, 64  # a side of a matrix product; rows of a program
_SCHEDULES: WeakTensorCache[Schedule] = WeakTensorCache()
_SHARES: WeakTensorCache[Shares] = WeakTensorCache()


class Shape(NamedTuple):
    """Of a kernel: rows of a tile, columns of a step, warps of a program, stages of its pipeline."""

    rows: int
    step: int
    warps: int
    stages: int


# The fastest first; what does not fit into shared memory is passed over.
FORWARD = Shape(128, 128, 8, 3), Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 2)
BACKWARD_QUERIES = Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 32, 8, 2), Shape(32, 32, 4, 2)
BACKWARD_KEYS = Shape(64, 64, 4, 2), Shape(64, 32, 8, 2), Shape(32, 32, 4, 2)


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels run there: half precision, NVIDIA's Ampere or newer, heads of at most 256."""
    return (
        device.type == "cuda"
        and _architecture(device.index or 0) >= AMPERE
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= LARGEST_HEAD
    )


def takes_hopper(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels in Gluon run there: a Hopper GPU, heads of 64 or 128, Triton 3.6 or newer."""
    return (
        takes(device, dtype, head_dim)
        and _architecture(device.index or 0) == HOPPER
        and head_dim in (64, 128)
        and GLUON
    )


@torch.compiler.assume_constant_result
def _architecture(index: int) -> int:
    """80 of sm_80; a number, since Dynamo of PyTorch 2.11 cannot compare constant tuples."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, table: BlockTable, scale: float, with_lse: bool, *, hopper: bool = False
) -> tuple[Tensor, Tensor]:
    """What `foveate.ops.block_attention` defines. The LSE comes at no cost, asked for or not."""
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    return _forward(q, k, v, *table, scale, hopper)


# By name: where it runs, and what runs. The last that takes the work is chosen.
BACKENDS = {"triton": (takes, block_attention), "hopper": (takes_hopper, partial(block_attention, hopper=True))}


@gpu_op("foveate::block_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    offsets: Tensor,
    keys: Tensor,
    scale: float,
    hopper: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = like(q), _lse_of(q)
    table = BlockTable(query_starts, key_starts, offsets, keys)
    if hopper and hopper_attention.takes(q, k, v):
        written = out, lse
        _on_hopper(hopper_attention.launch, table, (q, k, v), written, (0.0, -math.inf), scale, hopper_attention.CUT)
        return out, lse
    run = _Pass(q, k, table, FORWARD, tile_operands=1)
    q, k, v = map(side_by_side, (q, k, v))
    run(triton_attention.forward, (q, k, v, out), (lse,), (scale / math.log(2),))
    return out, lse


@_forward.register_fake
def _(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return like(q), _lse_of(q)


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
    scale: float,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = map(like, (q, k, v))
    table = BlockTable(query_starts, key_starts, offsets, keys)
    q, k, v, out, grad_out = map(side_by_side, (q, k, v, out, grad_out))
    delta = _deltas(out, grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse.contiguous())
    if hopper and hopper_attention.takes(q, k, v, grad_out):
        given = q, k, v, grad_out, lse, delta
        _on_hopper(hopper_backward.launch_queries, table, given, (dq,), (0.0,), scale, hopper_backward.CUT)
        _on_hopper(hopper_backward.launch_keys, table, given, (dk, dv), (0.0, 0.0), scale, hopper_backward.CUT)
        return dq, dk, dv
    scales = scale / math.log(2), scale
    over_queries = _Pass(q, k, table, BACKWARD_QUERIES, tile_operands=2)
    over_queries(triton_attention.backward_queries, (q, k, v, grad_out, dq), (lse, delta), scales)
    shapes = BACKWARD_KEYS[q.shape[3] > 128 :]  # the first spills with wide heads, and is too large for Blackwell
    over_keys = _Pass(q, k, table, shapes, tile_operands=2, transposed=True)
    over_keys(triton_attention.backward_keys, (q, k, v, grad_out, dk, dv), (lse, delta), scales)
    return dq, dk, dv


@_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, ...]:
    return like(q), like(k), like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    ctx.scale, ctx.hopper = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out = torch.zeros_like(ctx.saved_tensors[3]) if grad_out is None else grad_out
    return *_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.hopper), *6 * [None]


_forward.register_autograd(_differentiate, setup_context=_save)


def _on_hopper(
    launch: Any,
    table: BlockTable,
    given: tuple[Tensor, ...],
    written: tuple[Tensor, ...],
    nothing: tuple[float, ...],
    scale: float,
    cut: dict[str, int],
) -> None:
    """Launch a kernel for Hopper; what it leaves out of `written` for want of anything to read becomes `nothing`."""
    q, k, *_ = given
    table.check(q, k)
    transposed = launch is hopper_backward.launch_keys
    run = _SCHEDULES.get(
        table,
        (*cut.items(), transposed, q.device),
        lambda: schedule(table.transpose() if transposed else table, **cut, device=q.device),
    )
    samples, programs = q.shape[0] * q.shape[1], multiprocessors(q.device)
    sharing = _SHARES.get([run.tiles], (samples, programs), lambda: shares(run, samples, programs))
    if len(sharing.work) < samples * len(run.tiles):
        for x, value in zip(written, nothing, strict=True):
            x.fill_(value)
    launch(*given, *written, run, sharing, scale)


def _deltas(out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Tensor:
    """Of every query sum(out * grad_out) - grad_lse."""
    batch, heads, queries, head_dim = out.shape
    delta = torch.empty_like(grad_lse)
    if delta.numel():
        triton_attention.deltas[(batch * heads, triton.cdiv(queries, DELTA_ROWS))](
            out, grad_out, grad_lse, delta, heads, queries, *out.stride()[:3], *grad_out.stride()[:3],
            D=head_dim, BD=max(SMALLEST_DOT, triton.next_power_of_2(head_dim)), BM=DELTA_ROWS,
        )  # fmt: skip
    return delta


def _lse_of(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


# Kernels step from token to token by any stride, but the entries of a token lie side by side.


def side_by_side(x: Tensor) -> Tensor:
    """The tensor with the entries of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like(x: Tensor) -> Tensor:
    """Room for a tensor of that shape, in the same layout if that has the entries of a row side by side."""
    room = torch.empty_like(x)  # of overlapping tensors the layout is not kept
    return room if room.stride(-1) == 1 else x.new_empty(x.shape)


class _Pass:
    """One pass over a table: the kernel's shape on this device, and its schedule.

    Args:
        q: Queries.
        k: Keys.
        table: Who reads what.
        shapes: To choose from.
        tile_operands: How many operands of a tile's size a program keeps in shared memory.
        transposed: Over the keys instead of the queries.
    """

    def __init__(
        self, q: Tensor, k: Tensor, table: BlockTable, shapes: tuple[Shape, ...], *, tile_operands: int,
        transposed: bool = False,
    ):  # fmt: skip
        table.check(q, k)
        self.head_dim = max(SMALLEST_DOT, triton.next_power_of_2(q.shape[3]))
        self.shape = fitting(shapes, tile_operands, self.head_dim * q.element_size(), shared_memory(q.device))
        rows, step = self.shape[:2]
        self.schedule = _SCHEDULES.get(
            table,
            (rows, step, transposed, q.device),
            lambda: schedule(table.transpose() if transposed else table, rows=rows, step=step, device=q.device),
        )

    def __call__(
        self, kernel: Any, strided: tuple[Tensor, ...], flat: tuple[Tensor, ...], scales: tuple[float, ...]
    ) -> None:
        """Launch a kernel over [batch, heads, tokens, head_dim] and over contiguous [batch, heads, queries]."""
        batch, heads, queries, head_dim = strided[0].shape
        tiles, steps, long = self.schedule
        if not (batch * heads * len(tiles)):
            return
        kernel[(batch * heads * len(tiles),)](
            *strided, *flat, tiles, steps, *scales, len(tiles), long, heads, queries,
            *(stride for x in strided for stride in x.stride()[:3]),
            D=head_dim, BD=self.head_dim, BM=self.shape.rows, BN=self.shape.step, STAGES=self.shape.stages,
            num_warps=self.shape.warps,
        )  # fmt: skip


def fitting(shapes: tuple[Shape, ...], tile_operands: int, row: int, memory: int) -> Shape:
    """The first shape whose operands fit into so many bytes of shared memory; a row of an operand has `row` bytes."""
    for shape in shapes[:-1]:
        if (tile_operands * shape.rows + 2 * shape.stages * shape.step) * row <= memory:
            return shape
    return shapes[-1]


def multiprocessors(device: torch.device) -> int:
    """How many there are; the interpreter is one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; the interpreter has any amount."""
    if device.type != "cuda":
        return 2**20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
